"""The samples of a recipe in a storage root of a measurement's own: nothing of the user's is touched.

Files are hard links where both roots are on one disk: a measurement may delete its states, and writes none of
the files that it shares (a finished thing is never written to).
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from benchmarks.generation.target import RECIPE
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe

SAMPLES = ("target_model", "prompts", "synthetic_samples")
"""The assets that extraction starts from."""
STATES = (*SAMPLES, "hidden_state_shards")
"""Those that training starts from, but for what is made in seconds."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """--recipe and --storage, by default the demo's."""
    root = Path(os.environ.get("EAGLE3_STORAGE", RECIPE.parents[1] / "data"))
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="another one for a trial")
    parser.add_argument("--storage", type=Path, default=root, help="root with the samples of the recipe")


def own_lineage(
    recipe: Path, storage: Path, folder: Path, changes: dict[str, Any], assets: tuple[str, ...] = SAMPLES
) -> tuple[Lineage, Path]:
    """A lineage in `folder` with `assets` of `storage`, its recipe changed, and the path of its recipe.

    A later call with the same folder finds what an earlier one left. Raises MissingInput where a shard of
    samples is not made, and RecipeError.
    """
    path = write_recipe(folder / "recipe.yaml", recipe, changes)
    lineage = Lineage(load_recipe(str(path), path.parent), folder / "storage")
    if not lineage.folder.exists():
        source = Lineage(load_recipe(str(recipe), recipe.parent), storage)
        for shard in source.recipe.shards:
            source.synthetic_samples(shard).require()
        unfinished = lineage.folder.with_name(f".{lineage.folder.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        for asset in assets:
            if (source.folder / asset).is_dir():
                shutil.copytree(source.folder / asset, unfinished / asset, copy_function=_link)
        unfinished.rename(lineage.folder)
    return lineage, path


def write_recipe(path: Path, base: Path, changes: dict[str, Any]) -> Path:
    """A recipe that extends another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"extends": str(base.absolute()), **changes}, sort_keys=False))
    return path


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)
