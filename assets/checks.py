"""The checks of the assets: what is judged of a thing in the step that makes it, for the tab Checks.

A check warns and stops nothing: what must not go on fails its step by itself, with its reason. Only that of
the samples' quality, on `sample_audit`, is an error: its step has failed then, and the check says so where a
person looks. A run over several shards has one result, of all shards of the run.
"""

from collections.abc import Callable
from typing import Any

import dagster as dg

from assets.identity import asset_key
from eagle3_pipeline.evaluation.agreement import explanation
from eagle3_pipeline.evaluation.report import verdict
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.samples.quality import WAYS_OUT
from eagle3_pipeline.samples.sample import REJECTED

# Three tokens of which each is covered like this are all covered in 86 of 100 cases.
_LEAST_COVERAGE = 0.95
_WORST = 3  # shards that a result names

_DESCRIPTIONS = {
    "synthetic_samples": {
        "truncated_share": "Not more replies are cut than generation.max_truncated_share.",
        "rejected_share": "Not more replies are rejected than generation.max_rejected_share.",
        "degenerate_share": "Not more replies end in a loop than generation.max_degenerate_share.",
    },
    "sample_audit": {"quality": "The samples are within all bounds of the recipe. If not, the step fails."},
    "hidden_state_shards": {
        "quarantined_share": "Unusable states are below half of what fails the step "
        "(extraction.max_quarantined_share).",
        "meaning": "After the last layer's states, the target's head says what the samples say.",
    },
    "vocabulary_map": {"coverage": f"The draft can propose {_LEAST_COVERAGE:.0%} of the replies' tokens."},
    "draft_checkpoint": {
        "above_chance": "First proposals are right more often than the most frequent token would be.",
        "above_base": "On held-out samples the draft is accepted longer than the base draft was.",
    },
    "acceptance_report": {
        "faster": "Serving with the draft makes more tokens per second than without it.",
        "simulation_agrees": "Served and simulated acceptance of the conversations that judged agree "
        "within 3 %.",
    },
}


def checks_of(recipe: Recipe, asset: str) -> list[dg.AssetCheckSpec]:
    """The checks that a step of this asset evaluates."""
    described = dict(_DESCRIPTIONS[asset])
    if recipe.base_draft is None:
        described.pop("above_base", None)
    return [
        dg.AssetCheckSpec(name, asset=asset_key(recipe, asset), description=text)
        for name, text in described.items()
    ]


def check_samples(recipe: Recipe, made: list[Manifest]) -> list[dg.AssetCheckResult]:
    """The shares that have bounds, over the shards of a run; the audit judges those of all shards."""
    total = _sum(made, "samples")
    shares = {"truncated": ("truncated",), "rejected": REJECTED, "degenerate": ("degenerate",)}
    results = []
    for kind, verdicts in shares.items():
        share = sum(_sum(made, one) for one in verdicts) / max(total, 1)
        setting = f"max_{kind}_share"
        allowed = float(getattr(recipe.generation, setting))
        passed = share <= allowed
        text = f"{share:.1%} of {total:,} replies are {kind}, generation.{setting} is {allowed:.1%}."
        if not passed:
            worst = _worst(made, lambda one, of=verdicts: sum(one.facts[name] for name in of))
            text += (
                f" Worst: {worst}. If the other shards are no better, sample_audit fails: {WAYS_OUT[kind]}."
            )
        results.append(_result(f"{kind}_share", passed, text, share=share, allowed=allowed))
    return results


def failed_quality(recipe: Recipe, reason: str) -> dg.AssetCheckEvaluation:
    """That the samples are not within their bounds: to be logged before the step fails for this reason."""
    key, error = asset_key(recipe, "sample_audit"), dg.AssetCheckSeverity.ERROR
    return dg.AssetCheckEvaluation(key, "quality", passed=False, severity=error, description=reason)


def passed_quality(made: Manifest) -> dg.AssetCheckResult:
    """That they are."""
    shares = {name: made.facts[name] for name in ("truncated_share", "rejected_share", "degenerate_share")}
    text = ", ".join(f"{share:.1%} {name.removesuffix('_share')}" for name, share in shares.items())
    return dg.AssetCheckResult(
        check_name="quality", passed=True, description=f"{text}: within the bounds.", metadata=shares
    )


def check_states(recipe: Recipe, made: list[Manifest]) -> list[dg.AssetCheckResult]:
    """How many samples of a run have unusable states, and whether the others mean what was recorded."""
    kept, lost = _sum(made, "samples"), sum(map(_quarantined, made))
    share, allowed = lost / max(kept + lost, 1), recipe.extraction.max_quarantined_share
    text = f"The states of {lost:,} of {kept + lost:,} samples are unusable, {allowed:.1%} fail the step."
    if lost:
        text += (
            f" Worst: {_worst(made, _quarantined)}. The reasons stand in the fact quarantined of the shards; "
            "look at the extraction server's log."
        )
    seen = [(one, kind, of_kind) for one in made for kind, of_kind in one.facts["meaning"].items()]
    odd = [found for one in seen if (found := _odd(*one)) is not None]
    meaning = (
        "; ".join(odd[:_WORST]) + ". Other states of these samples were right, so that the first ones may be "
        "unlucky. If more shards are like this, look at the layers, and at the extraction server's flags."
        if odd
        else f"They do in all {len(made)} shards, as often as the target was sure."
    )
    return [
        _result("quarantined_share", share <= allowed / 2, text, share=share, allowed=allowed),
        _result("meaning", not odd, meaning, shards=len(made)),
    ]


def check_vocabulary(made: Manifest) -> dg.AssetCheckResult:
    """How many of the tokens can be proposed: of held-out replies where there are some."""
    facts = made.facts
    held_out = facts.get("held_out_coverage")
    share, of = (facts["coverage"], "the") if held_out is None else (held_out, "held-out")
    text = (
        f"{facts['draft_tokens']:,} tokens cover {share:.2%} of {of} replies, expected "
        f"{_LEAST_COVERAGE:.0%}. Each other token ends a draft."
    )
    if share < _LEAST_COVERAGE:
        text += (
            " The base draft keeps its own tokens: take another one, or none."
            if facts["from_base_draft"]
            else " Raise vocabulary.draft_tokens: the metadata sizes says what that would bring."
        )
    return _result("coverage", share >= _LEAST_COVERAGE, text, share=share)


def check_draft(recipe: Recipe, facts: dict[str, Any]) -> list[dg.AssetCheckResult]:
    """Whether training has taught anything; `facts` of a draft, or of a wave on the way to it."""
    if not {"accuracy_by_position", "chance"} <= facts.keys():
        nothing = "It is not noted how often the most frequent token is right, so nothing is compared."
        return [_result(one.name, True, nothing) for one in checks_of(recipe, "draft_checkpoint")]
    first, chance = float(facts["accuracy_by_position"][0]), float(facts["chance"])
    text = (
        f"The first proposal is right for {first:.1%} of the held-out tokens; always the most frequent one "
        f"would be for {chance:.1%}."
    )
    if first <= chance:
        text += " Look at the loss: more epochs, more samples, or another training.learning_rate."
    results = [_result("above_chance", first > chance, text, accuracy=first, chance=chance)]
    if recipe.base_draft is not None:
        better = int(facts["best_step"]) > 0
        length = float(facts["simulated_acceptance_length"])
        gained = (
            f"Trained, the draft has an acceptance length of {length:.3f}, longer than the base draft's."
            if better
            else f"No epoch was better than the base draft itself ({length:.3f}), which is what is kept. "
            "Lower training.learning_rate, or train on more and broader prompts."
        )
        results.append(_result("above_base", better, gained, acceptance_length=length))
    return results


def check_report(facts: dict[str, Any]) -> list[dg.AssetCheckResult]:
    """Whether the draft is faster, and accepted as it was simulated: it may be the best there is if not."""
    ratio, speedup = facts["simulation_ratio"], float(facts["speedup"])
    numbers = {} if ratio is None else {"simulation_ratio": ratio}
    return [
        _result("faster", speedup > 1, verdict(facts), speedup=speedup),
        _result("simulation_agrees", bool(facts["simulation_agrees"]), explanation(facts), **numbers),
    ]


def _result(name: str, passed: bool, text: str, **numbers: float) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name=name,
        passed=passed,
        severity=dg.AssetCheckSeverity.WARN,
        description=text,
        metadata=numbers,
    )


def _sum(made: list[Manifest], fact: str) -> int:
    return sum(int(one.facts[fact]) for one in made)


def _quarantined(made: Manifest) -> int:
    return sum(made.facts["quarantined"].values())


def _worst(made: list[Manifest], number: Callable[[Manifest], int]) -> str:
    """Those shards with the most, such as `p100-s003 12, p100-s001 3`."""
    ranked = sorted(made, key=number, reverse=True)[:_WORST]
    return ", ".join(f"{one.shard} {number(one)}" for one in ranked if number(one))


def _odd(made: Manifest, kind: str, seen: dict[str, float]) -> str | None:
    """A shard whose first states were further off than chance allows, though it was let through."""
    if seen["expected_share"] - seen["agreed_share"] <= seen["bound"]:
        return None
    return (
        f"{made.shard}: the recorded token is the likeliest one after {seen['agreed_share']:.1%} of the "
        f"states of {kind} replies, expected {seen['expected_share']:.1%} within {seen['bound']:.1%}"
    )
