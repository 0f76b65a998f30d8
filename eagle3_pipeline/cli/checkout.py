"""The checkout that a command works in: its recipes, its code location, its storage root."""

import argparse
import os
from pathlib import Path

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.recipe.file import DEFAULT_RECIPE

CHECKOUT = Path(__file__).resolve().parents[2]


def add_recipe(parser: argparse._ActionsContainer, default: str | None = DEFAULT_RECIPE) -> None:
    """The option that names a recipe."""
    shown = f"name in recipes/, or a path{' (%(default)s)' if default else ''}"
    parser.add_argument("--recipe", metavar="NAME", default=default, help=shown)


def lineage_of(name: str) -> Lineage:
    """The places of a recipe below the storage root; raises RecipeError."""
    recipe = load_recipe(name, CHECKOUT / "recipes")
    return Lineage(recipe, Path(os.environ.get("EAGLE3_STORAGE", CHECKOUT / "data")).absolute())


def dagster_home() -> Path:
    """The folder of Dagster's records, with this checkout's settings in it."""
    home = Path(os.environ.get("DAGSTER_HOME", CHECKOUT / ".dagster")).absolute()
    home.mkdir(parents=True, exist_ok=True)
    settings = home / "dagster.yaml"
    if settings.is_symlink():
        settings.unlink()  # it may point to where the checkout lay before
    if not settings.exists():
        settings.symlink_to(os.path.relpath(CHECKOUT / "dagster.yaml", home))
    return home
