"""What a draft was made from, as rows for people: which prompts, target, servers, shards, and which code.

    thing                what it is                                            content       code
    target               HuggingFaceTB/SmolLM2-135M-Instruct                   0123456789ab  3ed4150c3e7c
    generation server    --max-model-len 2048 --dtype bfloat16
    samples              400 in 4 shards, p100-s000 to p100-s003, ...          fedcba987654  3ed4150c3e7c

Numbers, flags, content and code are those of the manifests. provenance.json of a release says it for
programs, with every setting.
"""

from collections.abc import Iterable
from typing import Any

from eagle3_pipeline.alternatives import chosen
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.recipe.extras import FLAG_OF_SETTING
from eagle3_pipeline.recipe.prompts import PromptSource
from eagle3_pipeline.release.names import target_name, without_secrets_and_paths

Row = dict[str, str]


def draft_made_from(lineage: Lineage) -> list[Row]:
    """Rows of all that the draft was trained on; raises MissingInput where something is not made."""
    recipe = lineage.recipe
    target, prompts = lineage.target_model().require(), lineage.prompts().require()
    samples = lineage.made([lineage.synthetic_samples(shard) for shard in recipe.shards])
    states = lineage.made([lineage.hidden_state_shards(shard) for shard in recipe.shards])
    vocabulary = chosen(lineage).vocabulary_map().require()
    judges = len(prompts.facts["validation"])
    sources = ", ".join(map(_source, recipe.prompts.sources))
    rows = [
        _row("target", target_name(recipe.target), [target]),
        _row("prompts", f"{prompts.facts['count']:,} of {sources}; {judges} of them judge", [prompts]),
        _server("generation server", samples),
        _row("samples", f"{_total(samples, 'samples')} in {_shards(samples)}, {_sampling(samples)}", samples),
        _server("extraction server", states),
        _row("hidden states", f"{_shards(states)}, {_form(states)}", states),
        _row("vocabulary", f"{vocabulary.facts['draft_tokens']:,} tokens", [vocabulary]),
    ]
    if recipe.base_draft is not None:
        name = recipe.base_draft.hub_id or str(recipe.base_draft.path and recipe.base_draft.path.name)
        rows.append(_row("base draft", name, [lineage.base_draft().require()]))
    return rows


def release_made_from(lineage: Lineage) -> list[Row]:
    """The same of a release, with the draft and the report that let it pass; raises MissingInput."""
    draft, report = lineage.draft_checkpoint().require(), lineage.acceptance_report().require()
    length, speedup = report.facts["acceptance_length"], report.facts["speedup"]
    measured = f"acceptance length {length:.3f}, speed-up {speedup:.2f}"
    return [
        *draft_made_from(lineage),
        _row("draft", f"the weights of step {draft.facts['best_step']:,}", [draft]),
        _row("report", measured, [report]),
    ]


def _row(thing: str, what: str, made: list[Manifest]) -> Row:
    digests = [one.digest for one in made]
    return {
        "thing": thing,
        "what it is": what,
        "content": (digests[0] if len(digests) == 1 else fingerprint(digests))[:12],
        "code": _each([str(one.made_by.get("commit", "unknown")) for one in made]),
        "made at": max(one.made_at for one in made),
    }


def _server(name: str, made: list[Manifest]) -> Row:
    """The flags that decide what comes out. All shards of a recipe have the same, or they were others."""
    flags = _flags(made[0].inputs["server"])
    return {"thing": name, "what it is": flags, "content": "", "code": "", "made at": ""}


def _flags(settings: dict[str, Any]) -> str:
    """As vLLM spells them; of the environment, whose values may be secrets, there is only a hash."""
    given = [
        f"{FLAG_OF_SETTING[name]} {value}"
        for name, value in settings.items()
        if name in FLAG_OF_SETTING and value is not None
    ]
    given += without_secrets_and_paths(list(settings["extra_args"]))
    if settings["extra_env"] is not None:
        given.append(f"(extra_env {settings['extra_env'][:12]})")
    return " ".join(given)


def _sampling(samples: list[Manifest]) -> str:
    settings = samples[0].inputs["sampling"]
    return (
        f"temperature {settings['temperature']:g}, top-p {settings['top_p']:g}, top-k {settings['top_k']}, "
        f"at most {settings['max_completion_tokens']:,} tokens"
    )


def _form(states: list[Manifest]) -> str:
    settings = states[0].inputs
    return f"layers {', '.join(map(str, settings['layers']))}, {settings['precision']}"


def _shards(made: list[Manifest]) -> str:
    first, last = made[0].shard, made[-1].shard
    return f"1 shard, {first}" if len(made) == 1 else f"{len(made)} shards, {first} to {last}"


def _total(made: list[Manifest], fact: str) -> str:
    return f"{sum(int(one.facts[fact]) for one in made):,}"


def _each(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _source(source: PromptSource) -> str:
    """Its public name, or the file's own."""
    if source.dataset is None:
        return str(source.path and source.path.name)
    return f"{source.dataset} ({', '.join(one for one in (source.subset, source.split) if one)})"
