"""The step `sample_audit`: the barrier between generation and extraction.

It passes when every shard of the run is made, the quality of the samples is within the recipe's
bounds and the hidden states will fit on the disk, at once or in waves. audit.json has the numbers per
shard and in all; the facts `waves` (names of shards) and `passes` are the plan that later steps keep to.
"""

import json
import logging
from dataclasses import dataclass, replace
from typing import Any

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.samples.byte_plan import BytePlan, ShardLengths, byte_plan, shard_lengths
from eagle3_pipeline.samples.decided_waves import waves_under_way
from eagle3_pipeline.samples.drift import Retokenizer
from eagle3_pipeline.samples.fitting import Fit, require_room
from eagle3_pipeline.samples.lengths import histogram
from eagle3_pipeline.samples.quality import Quality, require_quality
from eagle3_pipeline.samples.sample import Sample
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, iter_samples
from eagle3_pipeline.samples.state_room import gib

_logger = logging.getLogger(__name__)

AUDIT_NAME = "audit.json"
# Of each shard, evenly spread: at most a second or two of the tokenizer's time.
_DRIFT_SAMPLES = 100


@dataclass(frozen=True)
class ShardAudit:
    """What is kept of a shard when its samples are read: numbers, never the samples."""

    quality: Quality
    """Of the samples that are to train; the drift is that of all."""
    judges: Quality
    lengths: ShardLengths


def audit_samples(lineage: Lineage) -> Manifest:
    """Judge the samples of the run; what passed before is not judged again.

    Raises MissingInput for shards that are not made, DamagedFile for one that differs from its
    manifest, QualityError for a number outside its bound and NotEnoughRoom for the byte plan.
    """
    made = _made(lineage)
    place = lineage.sample_audit()
    if (manifest := place.manifest()) is not None:
        return manifest
    retokenizer = Retokenizer.of(
        lineage.model_path(), trust_remote_code=lineage.recipe.target.trust_remote_code
    )
    audits = {shard: _read(lineage, shard, one, retokenizer) for shard, one in made.items()}
    qualities = {shard: one.quality for shard, one in audits.items()}
    judges = Quality.total(one.judges for one in audits.values())
    plan = byte_plan(lineage, [one.lengths for one in audits.values()])
    require_quality(qualities, judges, plan, lineage.recipe.generation)
    extraction = _extraction(lineage, plan)
    total = Quality.total(qualities.values())
    audit = {
        "verdict": "passed",
        "totals": total.facts(),
        "judges": judges.verdicts(),
        "extraction": extraction,
        "shards": {shard: one.facts() for shard, one in qualities.items()},
    }
    place.folder.mkdir(parents=True, exist_ok=True)
    path = place.folder / AUDIT_NAME
    write_json(path, audit)
    _logger.info(
        f"{total.counts['samples']} samples pass: {total.share('truncated'):.1%} truncated, "
        f"{total.share('rejected'):.1%} rejected; {plan.judges} others judge; the states of {plan.tokens} "
        f"tokens take {gib(plan.bytes)}"
        + (f", in {waves} waves" if (waves := len(extraction["waves"])) > 1 else "")
    )
    facts = {"verdict": "passed", "shards": len(made), **total.facts(), "judges": judges.verdicts()}
    return place.finish([path], {**facts, **extraction, "completion_lengths": histogram(total.lengths)})


def shards_of_audit(lineage: Lineage) -> dict[str, dict[str, Any]]:
    """The numbers of each shard in an audit that passed."""
    audit: dict[str, Any] = json.loads((lineage.sample_audit().folder / AUDIT_NAME).read_text())
    shards: dict[str, dict[str, Any]] = audit["shards"]
    return shards


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


def _read(lineage: Lineage, shard: str, made: Manifest, retokenizer: Retokenizer | None) -> ShardAudit:
    """Go once through the samples of a shard; only some for the drift are held."""
    every = -(-int(made.facts["samples"]) // _DRIFT_SAMPLES)
    validation = set(lineage.prompts().require().facts["validation"])
    quality, judges = Quality.empty(), Quality.empty()
    trained: list[tuple[int, int]] = []
    spread: list[Sample] = []
    for number, one in enumerate(iter_samples(lineage.synthetic_samples(shard).folder / SAMPLES_NAME)):
        (judges if one.prompt_id in validation else quality).add(one)
        if one.trains(lineage.recipe.generation.train_truncated):
            prompt = len(one.prompt_token_ids)
            trained.append((prompt, prompt + len(one.completion_token_ids)))
        if number % every == 0:
            spread.append(one)
    return ShardAudit(
        replace(quality, drift=retokenizer.drift(spread) if retokenizer else None),
        judges,
        shard_lengths(lineage, shard, trained),
    )


def _extraction(lineage: Lineage, plan: BytePlan) -> dict[str, Any]:
    """The plan of bytes and waves as facts. Waves that a training goes by are kept.

    Raises NotEnoughRoom, and RecipeError where there is no room for one wave, but alternatives or patience.
    """
    fit = Fit.of(lineage, plan)
    if (under_way := waves_under_way(lineage)) is not None:
        waves, passes = under_way
    else:
        waves = require_room(fit).waves
        # Going through one wave twice would delete what fits, and extract it again for nothing.
        passes = lineage.recipe.extraction.passes if len(waves) > 1 else 1
    lineage.recipe.training.require_one_wave(len(waves))
    return {**plan.numbers(), "free_bytes": fit.room.bytes, "waves": waves, "passes": passes}
