"""prompts: what the target will be asked."""

from typing import Any

import dagster as dg

from assets.identity import identity
from assets.outcome import outcome
from assets.step import RETRIES, step
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.prompts.selection import make_prompts
from eagle3_pipeline.recipe import Recipe
from resources import Storage


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""

    @dg.asset(**identity(recipe, "prompts", {"jsonl"}, ("target_model",)), retry_policy=RETRIES)
    def prompts(storage: Storage) -> dg.MaterializeResult:
        """The prompts of the recipe's sources, screened, in an order fixed by sources and seed.

        A smaller count is a prefix of a larger one. Every rejected row is listed with its reason.
        """
        lineage = storage.lineage(recipe)
        with step(lineage):
            manifest = make_prompts(lineage)
            return outcome(lineage.prompts(), manifest, decided_by=_order(manifest), **_tables(manifest))

    return prompts


def _order(manifest: Manifest) -> list[Any]:
    """What fixes the prompts of the first shards, however many there are: a larger count adds to them."""
    inputs = {name: value for name, value in manifest.inputs.items() if name != "count"}
    return [inputs, next(iter(manifest.facts["shards"].values()))]


def _tables(manifest: Manifest) -> dict[str, Any]:
    """What became of the rows, by reason and by source: tables in place of the facts of these names."""
    return {
        name: dg.MetadataValue.table([dg.TableRecord(line) for line in manifest.facts[name]])
        for name in ("screening", "sources")
    }
