"""The step `sample_audit`: the barrier between generation and extraction.

It passes when every shard of the run is made, the quality of the samples is within the recipe's
bounds and the hidden states will fit on the disk. audit.json has the numbers per shard and in all.
"""

import logging
from typing import Any

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.errors import MissingInput, QualityError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.samples.byte_plan import BytePlan, ShardLengths, require_room
from eagle3_pipeline.samples.sample import REJECTED, VERDICTS
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, read_samples

_logger = logging.getLogger(__name__)

AUDIT_NAME = "audit.json"
_COUNTS = ("samples", *VERDICTS, "prompt_tokens", "completion_tokens")


def audit_samples(lineage: Lineage) -> Manifest:
    """Judge the samples of the run; what passed before is not judged again.

    Raises MissingInput for shards that are not made, DamagedFile for one that differs from its
    manifest, QualityError for a share outside its bound and NotEnoughRoom for the byte plan.
    """
    shards = _made(lineage)
    place = lineage.sample_audit()
    if (manifest := place.manifest()) is not None:
        return manifest
    per_shard = {name: {key: int(one.facts[key]) for key in _COUNTS} for name, one in shards.items()}
    totals = {key: sum(counts[key] for counts in per_shard.values()) for key in _COUNTS}
    shares = _shares(totals)
    _require_quality(lineage, totals, shares)
    plan = _plan(lineage)
    require_room(lineage, plan)
    audit = {
        "verdict": "passed",
        "totals": totals,
        "shares": shares,
        "extraction": plan.numbers(),
        "shards": {name: {**per_shard[name], **_shares(per_shard[name])} for name in shards},
    }
    place.folder.mkdir(parents=True, exist_ok=True)
    path = place.folder / AUDIT_NAME
    write_json(path, audit)
    facts = {"verdict": "passed", "shards": len(shards), **totals, **shares, **plan.numbers()}
    _logger.info(
        f"{totals['samples']} samples pass: {shares['truncated_share']:.1%} truncated, "
        f"{shares['rejected_share']:.1%} rejected; the states of {plan.tokens} tokens take "
        f"{plan.tokens * plan.bytes_per_token / 2**30:.2f} GiB"
    )
    return place.finish([path], facts)


def _made(lineage: Lineage) -> dict[str, Manifest]:
    """The manifests of all shards of the run, each compared with its files."""
    places = {shard: lineage.synthetic_samples(shard) for shard in lineage.recipe.shards}
    missing = [shard for shard, place in places.items() if place.manifest() is None]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise MissingInput(
            f"{len(missing)} of {len(places)} shards of synthetic_samples are not made: "
            f"{', '.join(missing[:5])}{more}. Materialise synthetic_samples for them; what is recorded of "
            "them is kept."
        )
    return {shard: place.verify() for shard, place in places.items()}


def _shares(counts: dict[str, int]) -> dict[str, float]:
    rejected = sum(counts[verdict] for verdict in REJECTED)
    samples = max(counts["samples"], 1)
    return {
        "truncated_share": round(counts["truncated"] / samples, 4),
        "rejected_share": round(rejected / samples, 4),
    }


def _require_quality(lineage: Lineage, totals: dict[str, int], shares: dict[str, float]) -> None:
    bounds = lineage.recipe.generation
    truncated, rejected = shares["truncated_share"], shares["rejected_share"]
    problems = []
    if truncated > bounds.max_truncated_share:
        problems.append(
            f"{totals['truncated']} of {totals['samples']} samples ({truncated:.1%}) ran into "
            f"max_completion_tokens = {bounds.max_completion_tokens}, allowed are "
            f"{bounds.max_truncated_share:.1%}: raise generation.max_completion_tokens (this makes all "
            "samples again), or max_truncated_share if cut answers do for the draft"
        )
    if rejected > bounds.max_rejected_share:
        reasons = ", ".join(f"{totals[verdict]} {verdict}" for verdict in REJECTED)
        problems.append(
            f"{rejected:.1%} of {totals['samples']} samples are rejected ({reasons}), allowed are "
            f"{bounds.max_rejected_share:.1%}: look at their verdict and content in {SAMPLES_NAME}. Loops "
            "come from a low temperature or a wrong chat template, empty answers from a wrong reasoning "
            "parser, refusals from prompts that do not fit max_model_len; else raise "
            "generation.max_rejected_share"
        )
    if totals["good"] + (totals["truncated"] if bounds.train_truncated else 0) == 0:
        problems.append(
            f"none of {totals['samples']} samples can be trained on (train_truncated is "
            f"{bounds.train_truncated})"
        )
    if problems:
        raise QualityError("the samples are not good enough to go on: " + "; and ".join(problems) + ".")


def _plan(lineage: Lineage) -> BytePlan:
    recipe = lineage.recipe
    lengths = []
    for shard in recipe.shards:
        path = lineage.synthetic_samples(shard).folder / SAMPLES_NAME
        trained = [one for one in read_samples(path) if one.trains(recipe.generation.train_truncated)]
        lengths.append(
            ShardLengths(
                shard,
                [(len(one.prompt_token_ids), len(one.token_ids)) for one in trained],
                is_extracted=lineage.hidden_state_shards(shard).manifest() is not None,
            )
        )
    hidden: Any = lineage.target_model().require().facts["hidden_size"]
    return BytePlan(lengths, recipe.extraction.max_sample_tokens, len(recipe.extraction.layers), int(hidden))
