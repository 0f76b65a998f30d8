"""The small target of the benchmarks: a folder that is given, or SmolLM2 as the demo's recipe makes it."""

import os
from pathlib import Path

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.target import make_target

_ROOT = Path(__file__).parents[2]
RECIPE = _ROOT / "recipes" / "smollm2-cpu.yaml"


def target_folder(given: Path | None) -> Path:
    """`given`, or the demo's target below the storage root, made where it is not there yet."""
    if given is not None:
        return given
    lineage = Lineage(
        load_recipe(str(RECIPE), RECIPE.parent), Path(os.environ.get("EAGLE3_STORAGE", _ROOT / "data"))
    )
    make_target(lineage)
    return lineage.model_path()
