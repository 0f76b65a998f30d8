"""`python -m eagle3_pipeline.training PLAN`: one training run in a process of its own, events on stdout.

Where the plan has several processes, torchrun starts each of them like this.
"""

import logging
import os
import signal
import sys
import traceback
from pathlib import Path

from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.training.events import emit
from eagle3_pipeline.training.parent import end_with_parent
from eagle3_pipeline.training.plan import TrainingPlan


def main(arguments: list[str]) -> int:
    """Run the plan; 0 when the turn is trained. A `failed` event of any process says why not."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    end_with_parent()
    try:
        from eagle3_pipeline.training.process import run_plan  # seconds of imports

        if not run_plan(TrainingPlan.read(Path(arguments[0]))):
            return 128 + signal.SIGTERM
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, Eagle3Error):
            emit("failed", error=type(error).__name__, message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # see group.join
