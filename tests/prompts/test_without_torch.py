"""Prompts and recipes work where torch is not installed."""

import subprocess
import sys

_PROGRAM = """
import pkgutil, sys
sys.modules["torch"] = None  # any import of it raises ImportError
import eagle3_pipeline.prompts, eagle3_pipeline.recipe
for package in (eagle3_pipeline.prompts, eagle3_pipeline.recipe):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        __import__(module.name)
late = {"transformers", "datasets", "pyarrow", "huggingface_hub"} & set(sys.modules)
assert not late, f"imported too early: {late}"
"""


def test_no_module_of_prompts_and_recipe_imports_torch_or_a_slow_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
