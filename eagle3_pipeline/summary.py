"""Tables for people: where a recipe stands, and at its end what was made and what the draft is worth."""

from collections.abc import Callable
from functools import partial

from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.evaluation.report import verdict
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Place


def summary(lineage: Lineage) -> str:
    """The table of a finished recipe; raises MissingInput where something is not made yet."""
    shards = lineage.recipe.shards
    samples = lineage.made([lineage.synthetic_samples(shard) for shard in shards])
    states = lineage.made([lineage.hidden_state_shards(shard) for shard in shards])
    draft = lineage.draft_checkpoint().require().facts
    report = lineage.acceptance_report().require().facts
    lineage.released_draft().require()

    def total(name: str) -> int:
        return sum(int(manifest.facts[name]) for manifest in samples)

    count = total("samples")
    positions = "  ".join(f"{share:.3f}" for share in report["acceptance_by_position"])
    rows = {
        "samples": f"{count:,} in {len(shards)} shards, {total('good'):,} complete",
        "truncated": f"{total('truncated') / max(count, 1):.1%}",
        "tokens": f"{total('prompt_tokens'):,} prompt + {total('completion_tokens'):,} completion",
        "hidden states": f"{sum(one.bytes for one in states) / 2**20:,.0f} MiB, layers "
        f"{list(lineage.recipe.extraction.layers)}",
        "training": f"{draft['steps']:,} steps, {draft['tokens']:,} tokens in {draft['seconds']:.0f} s",
        "acceptance length": f"{report['acceptance_length']:.3f} tokens per step "
        f"({report['drafts']:,} drafts of {lineage.recipe.evaluation.speculative_tokens} tokens)",
        "by position": positions,
        **{
            f"  on {name}": f"{one['acceptance_length']:.3f}, speed-up {one['speedup']:.2f}"
            for name, one in report["sets"].items()
        },
        "tokens per second": f"{report['tokens_per_second_without']:.1f} without the draft, "
        f"{report['tokens_per_second_with']:.1f} with it",
        "draft": str(lineage.released_draft().folder),
    }
    width = max(map(len, rows))
    table = "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())
    return f"{table}\n\n  {verdict(report)}"


def standing(lineage: Lineage) -> str:
    """One line per asset: made (when, how large), or what it waits for."""
    shards = lineage.recipe.shards
    steps: dict[str, list[Callable[[], Place]]] = {
        "target_model": [lineage.target_model],
        **({"base_draft": [lineage.base_draft]} if lineage.recipe.base_draft else {}),
        "prompts": [lineage.prompts],
        "synthetic_samples": [partial(lineage.synthetic_samples, shard) for shard in shards],
        "sample_audit": [lineage.sample_audit],
        "hidden_state_shards": [partial(lineage.hidden_state_shards, shard) for shard in shards],
        "vocabulary_map": [lineage.vocabulary_map],
        "draft_checkpoint": [lineage.draft_checkpoint],
        "acceptance_report": [lineage.acceptance_report],
        "released_draft": [lineage.released_draft],
    }
    return "\n".join(f"  {name:<20} {_standing_of(places)}" for name, places in steps.items())


def _standing_of(places: list[Callable[[], Place]]) -> str:
    try:
        made = [manifest for place in places if (manifest := place().manifest()) is not None]
    except MissingInput:
        return "waits for what is above"
    if len(made) < len(places):
        return f"{len(made)} of {len(places)} shards" if len(places) > 1 else "not made yet"
    size = sum(manifest.bytes for manifest in made) / 2**20
    return f"made {max(manifest.made_at for manifest in made)}, {len(made)} x, {size:,.1f} MiB"
