"""synthetic_samples: the target's own answers, the text that the draft learns from."""

from functools import partial
from typing import Any

import dagster as dg

from assets.identity import asset_key, identity, shard_partitions, shards_of
from assets.outcome import announce, observe, range_outcome
from assets.step import RETRIES, step
from eagle3_pipeline.generation.collection import collect_samples
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.plots import histogram, lines, markdown_image
from eagle3_pipeline.recipe import Recipe
from resources import Storage, VllmServers


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""

    @dg.asset(
        **identity(recipe, "synthetic_samples", {"vllm", "parquet"}, ("prompts", "target_model")),
        partitions_def=shard_partitions(recipe),
        retry_policy=RETRIES,
    )
    def synthetic_samples(
        context: dg.AssetExecutionContext, storage: Storage, servers: VllmServers
    ) -> dg.MaterializeResult:
        """The target's completions of the prompts, one Parquet file per shard.

        Token ids are kept as the server returned them. One server serves all shards of the run; it
        is kept full across their borders. A killed run goes on with exactly the missing samples.
        """
        lineage = storage.lineage(recipe)
        on_shard = announce(context, recipe, lineage.synthetic_samples, _pictures)
        on_pulse = observe(context, asset_key(recipe, "synthetic_samples"))
        with step():
            shards = shards_of(context, recipe)
            server = partial(servers.generation, lineage)
            return range_outcome(collect_samples(lineage, shards, server, on_shard, on_pulse))

    return synthetic_samples


def _pictures(manifest: Manifest) -> dict[str, Any]:
    lengths = manifest.facts["completion_lengths"]
    drawn = {
        "completion_length_plot": (
            histogram(lengths["edges"], lengths["counts"], "Completion lengths", "tokens"),
            "completion lengths",
        )
    }
    history = manifest.facts.get("server_history")
    if history and history["seconds"]:
        seconds = history["seconds"]
        requests = {name: history[name] for name in ("limit", "running", "waiting")}
        tokens = {"tokens per second": history["tokens_per_second"]}
        drawn["in_flight_plot"] = (lines(seconds, requests, "Requests in flight", "seconds"), "in flight")
        drawn["speed_plot"] = (lines(seconds, tokens, "Tokens per second", "seconds"), "tokens per second")
    return {name: dg.MetadataValue.md(markdown_image(png, alt)) for name, (png, alt) in drawn.items()}
