"""hidden_state_shards: what the target computed on the samples, the input of training."""

from typing import Any

import dagster as dg

from assets.checks import check_states, checks_of
from assets.identity import identity, shard_partitions, shards_of
from assets.outcome import announce, range_outcome
from assets.step import RETRIES, step
from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.extraction.scales import scales_of
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.plots import bars, markdown_image
from eagle3_pipeline.recipe import Recipe
from resources import Storage, VllmServers


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""

    @dg.asset(
        **identity(recipe, "hidden_state_shards", {"vllm", "pytorch"}, ("synthetic_samples", "sample_audit")),
        partitions_def=shard_partitions(recipe),
        retry_policy=RETRIES,
        check_specs=checks_of(recipe, "hidden_state_shards"),
    )
    def hidden_state_shards(
        context: dg.AssetExecutionContext, storage: Storage, servers: VllmServers
    ) -> dg.MaterializeResult:
        """Hidden states of the recipe's layers for every token of the samples, as safetensors.

        They are what the draft is fed in serving, and what it learns to continue.
        A server of its own, proven on a few samples first, captures them while it reads the samples. Each
        is checked; what fails twice is quarantined and counted. The last layer must mean what was recorded.
        """
        lineage = storage.lineage(recipe)
        on_shard = announce(context, recipe, lineage.hidden_state_shards, _scales)
        with step(lineage):
            shards = shards_of(context, recipe)
            made = extract_shards(lineage, shards, servers.extraction(lineage), on_shard)
            return range_outcome(made, *check_states(recipe, made))

    return hidden_state_shards


def _scales(manifest: Manifest) -> dict[str, Any]:
    """The scale of each layer as a number that Dagster draws by shard, and of all layers as a picture."""
    if not (scales := scales_of(manifest.facts)):
        return {}
    labels = [str(layer) for layer in scales]
    image = bars(list(scales.values()), "Scale of the states: log of their RMS", "layer", labels=labels)
    numbers = {f"log_scale_of_layer_{layer}": scale for layer, scale in scales.items()}
    return {**numbers, "scale_plot": dg.MetadataValue.md(markdown_image(image, "scale by layer"))}
