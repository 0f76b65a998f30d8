"""The storage root: one folder for all recipes, on a disk that holds the hidden states."""

from pathlib import Path

import dagster as dg

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe


class Storage(dg.ConfigurableResource):
    """Gives each recipe its places below `root`, one folder per recipe."""

    root: str

    def lineage(self, recipe: Recipe) -> Lineage:
        """The places of everything that `recipe` makes."""
        return Lineage(recipe, Path(self.root).absolute())
