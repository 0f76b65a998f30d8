"""The storage root: one folder for all recipes, on a disk that holds the hidden states."""

from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import PrivateAttr

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe

_ONE_PARTITION = "dagster/partition"


class Storage(dg.ConfigurableResource):
    """Gives each recipe its places below `root`, one folder per recipe."""

    root: str
    _run: Any = PrivateAttr(default=None)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Dagster's hook: which run this is for."""
        self._run = context.run

    @property
    def path(self) -> Path:
        """The folder, whatever folder the process is in."""
        return Path(self.root).absolute()

    def lineage(self, recipe: Recipe) -> Lineage:
        """The places of what `recipe` makes; raises Failure in a run of the pipeline over a single shard."""
        if self._run is not None:
            _refuse_one_shard(self._run, recipe)
        return Lineage(recipe, self.path)


def _refuse_one_shard(run: dg.DagsterRun, recipe: Recipe) -> None:
    """A backfill of the pipeline's job makes a run per shard, each of which would want the whole graph."""
    job, shard = f"{recipe.slug}_pipeline", run.tags.get(_ONE_PARTITION)
    if run.job_name != job or shard is None:
        return
    raise dg.Failure(
        f"this run of {job} is of the one partition {shard}, expected all shards of the recipe in one run: "
        "what comes after the shards needs all of them. For everything: "
        f"dagster job execute -f definitions.py -j {job}. For single shards: "
        f"dagster job backfill -j {recipe.slug}_generate_samples --partitions {shard}, and then the same "
        f"with {recipe.slug}_extract_states.",
        allow_retries=False,
    )
