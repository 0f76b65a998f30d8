"""released_draft: the folder that vLLM serves."""

import dagster as dg

from assets.identity import identity
from assets.outcome import outcome
from assets.step import step
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.release.release import release_draft
from resources import Storage


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""
    deps = ("draft_checkpoint", "acceptance_report")

    @dg.asset(**identity(recipe, "released_draft", {"vllm", "safetensors"}, deps))
    def released_draft(storage: Storage) -> dg.MaterializeResult:
        """The draft, verified, with model card, provenance and checksums, if its report passes the gate."""
        lineage = storage.lineage(recipe)
        with step():
            return outcome(lineage.released_draft(), release_draft(lineage))

    return released_draft
