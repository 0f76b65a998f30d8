"""sample_audit: the barrier between generation and extraction."""

from typing import Any

import dagster as dg

from assets.checks import checks_of, failed_quality, passed_quality
from assets.identity import identity
from assets.outcome import metadata
from assets.step import step
from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.plots import dots, histogram, markdown_image
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.samples.audit import audit_samples, shards_of_audit
from resources import Storage, VllmServers

_COLUMNS = {
    "samples": "samples",
    "good": "good",
    "truncated share": "truncated_share",
    "rejected share": "rejected_share",
    "degenerate share": "degenerate_share",
    "median tokens": "completion_p50",
    "drift": "drift_share",
}


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""

    @dg.asset(
        **identity(recipe, "sample_audit", {"parquet"}, ("synthetic_samples",)),
        check_specs=checks_of(recipe, "sample_audit"),
    )
    def sample_audit(
        context: dg.AssetExecutionContext, storage: Storage, servers: VllmServers
    ) -> dg.MaterializeResult:
        """Every expected shard is there, its quality is within the recipe's bounds, its states will fit.

        It keeps a day of extraction and training from being spent on bad samples or on a full disk.
        Only when that holds is the generation server stopped, and only where extraction wants its
        GPUs. The data version holds the verdict and the plan of layers, type and waves, not the
        samples: one shard made again does not turn all states stale.
        """
        lineage = storage.lineage(recipe)
        with step(lineage):
            try:
                manifest = audit_samples(lineage)
            except QualityError as error:
                context.log_event(failed_quality(recipe, str(error)))
                raise
            for name in servers.release_generation(lineage):
                context.log.info(f"stopped {name}: its samples are complete and extraction needs its GPUs")
            pictures = _pictures(recipe, manifest, shards_of_audit(lineage))
        values = {**metadata(manifest, lineage.sample_audit().folder), **pictures}
        return dg.MaterializeResult(
            metadata=values,
            data_version=_version(recipe, manifest),
            check_results=[passed_quality(manifest)],
        )

    return sample_audit


def _version(recipe: Recipe, manifest: Manifest) -> dg.DataVersion:
    """Such as `passed-layers-2-15-27-30-bf16-all-waves-4-4-3-passes-1`: a wave by its number of shards."""
    extraction = recipe.extraction
    layers = "-".join(map(str, extraction.layers))
    waves = "-".join(str(len(wave)) for wave in manifest.facts["waves"])
    form = f"{extraction.precision}-{extraction.kept}"
    passes = manifest.facts["passes"]
    return dg.DataVersion(f"passed-layers-{layers}-{form}-waves-{waves}-passes-{passes}")


def _pictures(recipe: Recipe, manifest: Manifest, shards: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows = [
        {"shard": shard, **{title: facts[name] for title, name in _COLUMNS.items() if name in facts}}
        for shard, facts in shards.items()
    ]
    lengths = manifest.facts["completion_lengths"]
    image = histogram(lengths["edges"], lengths["counts"], "Completion lengths, all shards", "tokens")
    truncated = [facts["truncated_share"] for facts in shards.values()]
    bound = recipe.generation.max_truncated_share
    by_shard = dots(truncated, "Share of truncated samples, by shard", "shard", bound=bound)
    return {
        "quality_by_shard": dg.MetadataValue.table([dg.TableRecord(row) for row in rows]),
        "completion_length_plot": dg.MetadataValue.md(markdown_image(image, "completion lengths")),
        "truncated_share_plot": dg.MetadataValue.md(markdown_image(by_shard, "truncated share by shard")),
        "truncated_share_of_worst_shard": max(truncated, default=0.0),
    }
