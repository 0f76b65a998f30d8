"""released_draft: the folder that others serve, and where it is published."""

import dagster as dg

from assets.identity import identity
from assets.outcome import outcome, table
from assets.step import RETRIES, step
from eagle3_pipeline.made_from import release_made_from
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.release.commands import serve_line
from eagle3_pipeline.release.publishing import publish
from eagle3_pipeline.release.release import release_draft
from resources import Storage, VllmServers


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""
    deps = ("draft_checkpoint", "acceptance_report")

    @dg.asset(
        **identity(recipe, "released_draft", {"vllm", "safetensors", "huggingface"}, deps),
        retry_policy=RETRIES,
    )
    def released_draft(storage: Storage, servers: VllmServers) -> dg.MaterializeResult:
        """The draft, verified, with model card, provenance and checksums, if its report passes the gate.

        It is served once from its folder, gets its version, and is published where the recipe says.
        """
        lineage = storage.lineage(recipe)
        with step(lineage):
            manifest = release_draft(lineage, lambda folder: servers.evaluation(lineage, folder))
            where = publish(lineage)
            serve = serve_line(recipe, where["released"], target=str(lineage.model_path()))
            rows = table(release_made_from(lineage))
            return outcome(lineage.released_draft(), manifest, **where, serve=serve, made_from=rows)

    return released_draft
