"""The quality of samples, of one shard or of all: shares of verdicts, lengths, drift; and a recipe's bounds.

samples = good + truncated + rejected            rejected = empty + degenerate + refused

The bounds are for samples that are to train. Replies to validation prompts are greedy, so that more of them
loop whatever the recipe's sampling is: they are counted apart, and enough of them is one that can judge.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.recipe.generation import Generation, LengthBounds
from eagle3_pipeline.samples.byte_plan import BytePlan
from eagle3_pipeline.samples.drift import Drift
from eagle3_pipeline.samples.lengths import percentiles
from eagle3_pipeline.samples.sample import REJECTED, VERDICTS, Sample, verdict_trains
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME

# How many shards a failure names.
_WORST = 3
WAYS_OUT = {
    "truncated": (
        "raise generation.max_completion_tokens (this makes all samples again), or the bound if cut answers "
        "do for the draft"
    ),
    "rejected": (
        f"look at their verdict and content in {SAMPLES_NAME}. Loops come from a low temperature or a wrong "
        "chat template, empty answers from a wrong reasoning parser, refusals from conversations that do not "
        "fit server.generation.max_model_len; if the rest does for the draft, raise the bound"
    ),
    "degenerate": (
        "raise generation.temperature or lower generation.top_p (both make all samples again), look whether "
        "the chat template is the target's own, or raise the bound"
    ),
    "training": (
        f"look at their verdict and content in {SAMPLES_NAME}; set generation.train_truncated if cut answers "
        "do for the draft, raise extraction.max_sample_tokens if prompts leave no room for them"
    ),
    "judges": (
        "a model that loops when it is greedy needs more of these prompts: raise prompts.validation, of "
        "which at most half of the first shard is taken (prompts.per_shard); if answers are cut, set "
        "generation.train_truncated, or raise generation.max_completion_tokens or "
        "extraction.max_sample_tokens"
    ),
    "lengths": (
        f"read some answers in {SAMPLES_NAME}. Other lengths than expected come from a mode of thinking, a "
        "wrong chat template or other prompts; if the answers are right, correct the bounds"
    ),
}
"""What to do, by what is wrong with samples."""


@dataclass(frozen=True)
class Quality:
    """What was counted of some samples."""

    counts: dict[str, int]
    """`samples`, each verdict, `prompt_tokens` and `completion_tokens`."""
    lengths: list[int]
    """Completion tokens of each sample that is not refused."""
    drift: Drift | None
    """None where the target's folder has no tokenizer."""

    @classmethod
    def empty(cls) -> Self:
        """That of no sample."""
        return cls(dict.fromkeys(("samples", *VERDICTS, "prompt_tokens", "completion_tokens"), 0), [], None)

    def add(self, sample: Sample) -> None:
        """Count one more sample; the drift stays."""
        for name in ("samples", sample.verdict):
            self.counts[name] += 1
        self.counts["prompt_tokens"] += len(sample.prompt_token_ids)
        self.counts["completion_tokens"] += len(sample.completion_token_ids)
        if sample.verdict != "refused":
            self.lengths.append(len(sample.completion_token_ids))

    @classmethod
    def total(cls, parts: Iterable[Self]) -> Self:
        """The quality of several shards together."""
        parts = list(parts)
        drifts = [one.drift for one in parts if one.drift is not None]
        return cls(
            {name: sum(one.counts[name] for one in parts) for name in parts[0].counts},
            [length for one in parts for length in one.lengths],
            sum(drifts, Drift(0, 0)) if drifts else None,
        )

    def share(self, kind: str) -> float:
        """Share of the samples that are `truncated`, `degenerate` or `rejected`."""
        verdicts = REJECTED if kind == "rejected" else (kind,)
        return sum(self.counts[one] for one in verdicts) / max(self.counts["samples"], 1)

    def shares(self) -> dict[str, float]:
        """The shares that have bounds."""
        return {
            f"{kind}_share": round(self.share(kind), 4) for kind in ("truncated", "rejected", "degenerate")
        }

    def verdicts(self) -> dict[str, int]:
        """Samples, and how many there are of each verdict."""
        return {name: self.counts[name] for name in ("samples", *VERDICTS)}

    def facts(self) -> dict[str, Any]:
        """All numbers as JSON values, without the drift where there is none."""
        lengths, drift = percentiles(self.lengths), self.drift
        return {
            **self.counts,
            **self.shares(),
            "completion_p10": lengths["p10"],
            "completion_p50": lengths["p50"],
            "completion_p90": lengths["p90"],
            "completion_mean": round(sum(self.lengths) / max(len(self.lengths), 1), 1),
            "completion_longest": max(self.lengths, default=0),
            **(
                {"drift_share": round(drift.share, 4), "drift_samples": drift.checked}
                if drift is not None
                else {}
            ),
        }


def require_quality(
    shards: Mapping[str, Quality], judges: Quality, plan: BytePlan, bounds: Generation
) -> None:
    """Raise QualityError, with all that is wrong and the worst shards, unless samples are within bounds.

    `shards` are the samples that are to train, `judges` those that are to judge; of each, one must be left in
    `plan`.
    """
    total = Quality.total(shards.values())
    problems = [
        *_shares_outside(total, shards, bounds),
        *_lengths_outside(total, shards, bounds.completion_lengths),
    ]
    if not sum(plan.training):
        problems.append(
            f"none of {total.counts['samples']} samples can be trained on "
            f"({_unusable(total, plan, bounds)}): {WAYS_OUT['training']}"
        )
    if judges.counts["samples"] and not plan.judges:
        problems.append(
            f"none of {judges.counts['samples']} replies to validation prompts can judge the draft "
            f"({_unusable(judges, plan, bounds)}): {WAYS_OUT['judges']}"
        )
    if problems:
        raise QualityError("the samples are not good enough to go on: " + "; and ".join(problems) + ".")


def _unusable(quality: Quality, plan: BytePlan, bounds: Generation) -> str:
    found = [f"{quality.counts[verdict]} {verdict}" for verdict in VERDICTS if quality.counts[verdict]]
    usable = [verdict for verdict in VERDICTS if verdict_trains(verdict, bounds.train_truncated)]
    cut = sum(quality.counts[verdict] for verdict in usable)
    if cut:
        found.append(f"{cut} of them with less than two tokens of the reply in the first {plan.longest}")
    return ", ".join([*found, f"generation.train_truncated is {bounds.train_truncated}"])


def _shares_outside(total: Quality, shards: Mapping[str, Quality], bounds: Generation) -> Iterable[str]:
    reasons = ", ".join(f"{total.counts[verdict]} {verdict}" for verdict in REJECTED)
    found = {
        "truncated": f"samples ran into generation.max_completion_tokens = {bounds.max_completion_tokens}",
        "rejected": f"samples are rejected ({reasons})",
        "degenerate": "samples end in a loop",
    }
    for kind, what in found.items():
        setting = f"max_{kind}_share"
        share, allowed = total.share(kind), getattr(bounds, setting)
        if share > allowed:
            of_shard = {shard: one.share(kind) for shard, one in shards.items() if one.share(kind) > 0}
            worst = sorted(of_shard, key=of_shard.__getitem__, reverse=True)[:_WORST]
            named = ", ".join(f"{shard} {of_shard[shard]:.1%}" for shard in worst)
            yield (
                f"{share:.1%} of {total.counts['samples']} {what}, generation.{setting} is "
                f"{allowed:.1%} (worst: {named}): {WAYS_OUT[kind]}"
            )


def _lengths_outside(total: Quality, shards: Mapping[str, Quality], bounds: LengthBounds) -> Iterable[str]:
    found = percentiles(total.lengths)
    for name, tokens in found.items():
        allowed = getattr(bounds, name)
        if not total.lengths or allowed is None or allowed[0] <= tokens <= allowed[1]:
            continue
        is_long = tokens > allowed[1]
        of_shard = {shard: percentiles(one.lengths)[name] for shard, one in shards.items() if one.lengths}
        worst = sorted(of_shard, key=of_shard.__getitem__, reverse=is_long)[:_WORST]
        named = ", ".join(f"{shard} {of_shard[shard]}" for shard in worst)
        yield (
            f"the {name} of the completion lengths is {tokens} tokens, generation.completion_lengths.{name} "
            f"is {allowed[0]} to {allowed[1]} ({'longest' if is_long else 'shortest'}: {named}): "
            f"{WAYS_OUT['lengths']}"
        )
