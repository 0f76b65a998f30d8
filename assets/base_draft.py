"""base_draft: a pretrained draft to start from."""

import dagster as dg

from assets.identity import identity
from assets.outcome import outcome
from assets.step import RETRIES, step
from eagle3_pipeline.base_draft import make_base_draft
from eagle3_pipeline.recipe import Recipe
from resources import Storage


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe that names a base draft."""

    @dg.asset(**identity(recipe, "base_draft", {"huggingface"}, ("target_model",)), retry_policy=RETRIES)
    def base_draft(storage: Storage) -> dg.MaterializeResult:
        """The pretrained draft that training starts from, fetched while samples are being made.

        It is held against the target and the layers of the recipe at once. Only what trains waits for it.
        """
        lineage = storage.lineage(recipe)
        with step(lineage):
            manifest = make_base_draft(lineage)
            return outcome(lineage.base_draft(), manifest, decided_by=manifest.facts["model_fingerprint"])

    return base_draft
