"""sample_audit: the barrier between generation and extraction."""

import dagster as dg

from assets.identity import identity
from assets.outcome import metadata
from assets.step import step
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.samples.audit import audit_samples
from resources import Storage, VllmServers


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""

    @dg.asset(**identity(recipe, "sample_audit", {"parquet"}, ("synthetic_samples",)))
    def sample_audit(
        context: dg.AssetExecutionContext, storage: Storage, servers: VllmServers
    ) -> dg.MaterializeResult:
        """Every expected shard is there, its quality is within the recipe's bounds, its states will fit.

        Only when that holds is the generation server stopped, and only where extraction wants its
        GPUs. The data version holds the verdict and the layer plan, not the samples: one shard made
        again does not turn all states stale.
        """
        lineage = storage.lineage(recipe)
        with step():
            manifest = audit_samples(lineage)
            for name in servers.release_generation(lineage):
                context.log.info(f"stopped {name}: its samples are complete and extraction needs its GPUs")
        layers = "-".join(map(str, recipe.extraction.layers))
        version = dg.DataVersion(f"passed-layers-{layers}-bf16")
        place = lineage.sample_audit()
        return dg.MaterializeResult(metadata=metadata(manifest, place.folder), data_version=version)

    return sample_audit
