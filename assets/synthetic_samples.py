"""synthetic_samples: the target's own answers, the text that the draft learns from."""

from functools import partial
from typing import Any

import dagster as dg

from assets.checks import check_samples, checks_of
from assets.identity import asset_key, identity, shard_partitions, shards_of
from assets.outcome import announce, observe, range_outcome
from assets.step import RETRIES, step
from eagle3_pipeline.generation.collection import collect_samples
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.plots import histogram, lines, markdown_image
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.samples.columns import sample_columns
from resources import Storage, VllmServers


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""

    name, deps = "synthetic_samples", ("prompts", "target_model")

    @dg.asset(
        **identity(recipe, name, {"vllm", "parquet"}, deps, {"dagster/column_schema": _columns()}),
        partitions_def=shard_partitions(recipe),
        retry_policy=RETRIES,
        check_specs=checks_of(recipe, name),
    )
    def synthetic_samples(
        context: dg.AssetExecutionContext, storage: Storage, servers: VllmServers
    ) -> dg.MaterializeResult:
        """The target's own answers to the prompts, which the draft learns to foresee: a Parquet file a shard.

        Token ids are kept as the server returned them. One server serves all shards of the run; it
        is kept full across their borders. A killed run goes on with exactly the missing samples.
        """
        lineage = storage.lineage(recipe)
        on_shard = announce(context, recipe, lineage.synthetic_samples, _shown)
        on_pulse = observe(context, asset_key(recipe, name))
        with step(lineage):
            shards = shards_of(context, recipe)
            server = partial(servers.generation, lineage)
            made = collect_samples(lineage, shards, server, on_shard, on_pulse)
            return range_outcome(made, *check_samples(recipe, made))

    return synthetic_samples


def _columns() -> dg.TableSchema:
    """The columns of each shard's file, as the library writes them."""
    never_null = dg.TableColumnConstraints(nullable=False)
    columns = [
        dg.TableColumn(one.name, one.type, one.meaning, constraints=never_null) for one in sample_columns()
    ]
    return dg.TableSchema(columns=columns)


def _shown(manifest: Manifest) -> dict[str, Any]:
    """The pictures, and the share of truncated samples as a number that Dagster draws by shard."""
    truncated = manifest.facts["truncated"] / max(manifest.facts["samples"], 1)
    return {"truncated_share": round(truncated, 4), **_pictures(manifest)}


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
