"""target_model: the model to make faster."""

import dagster as dg

from assets.identity import identity
from assets.outcome import outcome
from assets.step import RETRIES, step
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.room import require_machine
from eagle3_pipeline.target import make_target
from resources import Storage


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""

    @dg.asset(**identity(recipe, "target_model", {"huggingface"}), retry_policy=RETRIES)
    def target_model(storage: Storage) -> dg.MaterializeResult:
        """The target (verifier): found locally, downloaded at its revision or converted from a package.

        Its content fingerprint goes into everything made from it: another model makes all of it anew.
        """
        lineage = storage.lineage(recipe)
        with step(lineage):
            manifest = make_target(lineage)
            require_machine(lineage)
            return outcome(
                lineage.target_model(),
                manifest,
                decided_by=manifest.facts["model_fingerprint"],
                trust_remote_code=recipe.target.trust_remote_code,
            )

    return target_model
