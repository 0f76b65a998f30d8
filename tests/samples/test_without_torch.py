"""Samples can be written, read and judged where torch is not installed, drift included."""

import subprocess
import sys
from pathlib import Path

from tests.samples.tokenizer import make_tokenizer

_PROGRAM = """
import pkgutil, sys
from pathlib import Path
sys.modules["torch"] = None  # any import of it raises ImportError
import eagle3_pipeline.samples
for module in pkgutil.iter_modules(eagle3_pipeline.samples.__path__, "eagle3_pipeline.samples."):
    __import__(module.name)
late = {"transformers", "datasets", "pyarrow"} & set(sys.modules)
assert not late, f"imported too early: {late}"
from eagle3_pipeline.samples.drift import Retokenizer
assert Retokenizer.of(Path(sys.argv[1]), trust_remote_code=False) is not None
"""


def test_no_module_of_samples_imports_torch_and_a_tokenizer_needs_none(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
