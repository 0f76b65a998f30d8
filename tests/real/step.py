"""A step in an operating-system process of its own, which opens the generation server of a recipe.

    python -m tests.real.step RECIPE STORAGE LOGS

It prints {"pid": of the server, "seconds": until it was open} and leaves.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.serving.server import open_server
from eagle3_pipeline.serving.specification import generation_server

ROOT = Path(__file__).parents[2]


def start_step(recipe: Path, lineage: Lineage, logs: Path) -> subprocess.Popen[str]:
    """Start a step for the recipe in a file; its lineage is given for the storage root."""
    argv = [sys.executable, "-m", __name__, str(recipe), str(lineage.storage_root), str(logs)]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_step(recipe: Path, lineage: Lineage, logs: Path) -> dict[str, Any]:
    """What a step said that was left to end by itself."""
    with start_step(recipe, lineage, logs) as step:
        said, complaint = step.communicate(timeout=300)
    assert step.returncode == 0, complaint
    found: dict[str, Any] = json.loads(said)
    return found


def main(recipe: str, storage: str, logs: str) -> None:
    lineage = Lineage(load_recipe(recipe, Path(recipe).parent), Path(storage))
    spec = generation_server(lineage)
    began = time.monotonic()
    with open_server(spec, Path(logs)) as server:
        print(json.dumps({"pid": server.pid, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main(*sys.argv[1:])
