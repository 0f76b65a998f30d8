"""`python -m eagle3_pipeline.cli` is the command `eagle3`."""

import sys

from eagle3_pipeline.cli import main

sys.exit(main())
