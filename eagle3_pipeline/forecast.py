"""What a recipe still takes: tokens, bytes, waves and hours, before a long job and during it.

Tokens of shards that are made are counted; the others are expected to be like them. Hours follow from the
speeds that were measured on this recipe, in whatever settings: those of a pilot, say.
"""

import calendar
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eagle3_pipeline.alternatives import alternatives
from eagle3_pipeline.errors import MissingInput, NotEnoughRoom, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import MANIFEST_NAME, Manifest, read_manifest
from eagle3_pipeline.report_forecast import ReportForecast, forecast_report
from eagle3_pipeline.room import expected_plan, known_lengths
from eagle3_pipeline.samples.byte_plan import BytePlan
from eagle3_pipeline.samples.extraction_room import require_room_for
from eagle3_pipeline.samples.fitting import Fit
from eagle3_pipeline.waves import is_trained, next_turn, records, turns

Lengths = dict[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class Phase:
    """One of the long phases: what is still to be done, and how fast it went so far."""

    name: str
    tokens_left: int
    tokens_per_second: float | None
    """None where it was not measured yet."""

    @property
    def seconds_left(self) -> float | None:
        """None where the speed is not known."""
        return self.tokens_left / self.tokens_per_second if self.tokens_per_second else None


@dataclass(frozen=True)
class Forecast:
    """All of it. `source` says in words where the token counts come from."""

    fit: Fit
    complaint: str | None
    """Why it does not fit, with the ways out: all of it, or once the waves are decided, the present one."""
    waves: list[list[str]]
    passes: int
    is_decided: bool
    """Whether sample_audit has fixed the waves."""
    source: str
    samples_made: int
    phases: list[Phase]
    report: ReportForecast

    @property
    def extraction_again(self) -> Phase:
        """What passes after the first extract again, whatever is done of it."""
        again = self.fit.plan.tokens * (self.passes - 1)
        return Phase("extraction", again, self.phases[1].tokens_per_second)


def forecast(lineage: Lineage) -> Forecast:
    """What is known now.

    Raises MissingInput without a target, DamagedFile for damaged samples, BadInput for evaluation sets.
    """
    recipe = lineage.recipe
    known = known_lengths(lineage)
    expected, source = _expected(lineage, known)
    fit = Fit.of(lineage, expected_plan(lineage, known, expected))
    audit = lineage.sample_audit().manifest() if len(known) == len(recipe.shards) else None
    waves = fit.wave_plan.waves if audit is None else [list(wave) for wave in audit.facts["waves"]]
    passes = recipe.extraction.passes if len(waves) > 1 else 1
    left = (len(recipe.shards) - len(known)) * sum(total - prompt for prompt, total in expected)
    extraction, training = _left(lineage, fit.plan, waves, passes)
    phases = [
        Phase("generation", left, _speed(lineage, "synthetic_samples", "completion_tokens")),
        Phase("extraction", extraction, _speed(lineage, "hidden_state_shards", "captured_tokens")),
        Phase("training", training, _training_speed(lineage)),
    ]
    complaint = _complaint(lineage, fit) if audit is None else _complaint_of_turn(lineage, waves)
    completions = [total - prompt for shard in known.values() for prompt, total in shard]
    report = forecast_report(lineage, completions)
    return Forecast(fit, complaint, waves, passes, audit is not None, source, len(known), phases, report)


def _complaint(lineage: Lineage, fit: Fit) -> str | None:
    if not fit.fits:
        return f"Choices: {'; '.join(fit.choices())}"
    try:
        lineage.recipe.training.require_one_wave(len(fit.wave_plan.waves))
    except RecipeError as error:
        return str(error)
    return None


def _complaint_of_turn(lineage: Lineage, waves: list[list[str]]) -> str | None:
    """Of the turn to work on: those before it are done with, and the later ones get its room."""
    try:
        turn = next_turn(lineage)
        shards = list(turn.shards) if turn else []
    except MissingInput:  # the vocabulary is not made yet
        shards = waves[0]
    except RecipeError as error:  # alternatives that came into the recipe after the waves were decided
        return str(error)
    try:
        require_room_for(lineage, shards)
    except NotEnoughRoom as error:
        return str(error)
    return None


def _expected(lineage: Lineage, known: Lengths) -> tuple[list[tuple[int, int]], str]:
    """Lengths of a shard that is not made, as in `known`, and where they come from."""
    recipe = lineage.recipe
    lengths = [one for shard in known.values() for one in shard]
    if not lengths:
        half = max(recipe.generation.max_completion_tokens // 2, 1)
        return [(0, half)] * recipe.prompts.per_shard, (
            "guessed: no samples yet, completions are taken as half of generation.max_completion_tokens"
        )
    if len(known) == len(recipe.shards):
        return [], "counted in all samples"
    # Every n-th of n shards: one with their mixture of lengths.
    return lengths[:: len(known)], f"estimated from the {len(known)} of {len(recipe.shards)} shards made"


def _left(lineage: Lineage, plan: BytePlan, waves: list[list[str]], passes: int) -> tuple[int, int]:
    """Tokens still to be extracted, and to be trained on."""
    tokens = {one.shard: one.tokens(plan.longest) for one in plan.shards}
    left = _shards_left(lineage, waves, passes)
    there = sum(tokens[one.shard] for one in plan.shards if one.is_extracted and one.shard in left)
    total = sum(tokens[shard] for shard in left)
    return total - there, _epochs_left(lineage) * total // passes


def _epochs_left(lineage: Lineage) -> int:
    """Those of one training, or of all alternatives that are not trained yet."""
    if not (recipes := alternatives(lineage)):
        return lineage.recipe.training.epochs
    return sum(one.recipe.training.epochs for one in recipes.values() if not is_trained(one))


def _shards_left(lineage: Lineage, waves: list[list[str]], passes: int) -> list[str]:
    """The shards of each turn that is not done, one after the other."""
    try:
        turn = next_turn(lineage)
        return [shard for one in turns(lineage)[turn.number :] for shard in one.shards] if turn else []
    except (MissingInput, RecipeError):  # samples, audit or vocabulary are not made yet, or waves refused
        return [shard for wave in waves for shard in wave] * passes


def _speed(lineage: Lineage, asset: str, counted: str) -> float | None:
    """Tokens per second over the time in which the things of this asset were made, breaks left out."""
    # What an earlier version made may not say all of it.
    made = [one for one in _manifests(lineage.folder / asset) if {counted, "seconds"} <= one.facts.keys()]
    seconds = _union([(_ended(one) - float(one.facts["seconds"]), _ended(one)) for one in made])
    return sum(int(one.facts[counted]) for one in made) / seconds if seconds else None


def _training_speed(lineage: Lineage) -> float | None:
    """The same of trainings, those included of which only some waves are done."""
    facts = []
    for folder in (lineage.folder / "draft_checkpoint").glob("*"):
        made = [read_manifest(path).facts for path in folder.glob(MANIFEST_NAME)]
        facts += made or [one.facts for one in records(folder)[-1:]]
    seconds = sum(float(one.get("seconds", 0)) for one in facts)
    return sum(int(one.get("tokens", 0)) for one in facts) / seconds if seconds else None


def _manifests(folder: Path) -> Iterator[Manifest]:
    for path in folder.glob(f"**/{MANIFEST_NAME}"):
        manifest = read_manifest(path)
        if float(manifest.facts.get("seconds", 0)) > 0:
            yield manifest


def _ended(manifest: Manifest) -> float:
    return calendar.timegm(time.strptime(manifest.made_at, "%Y-%m-%dT%H:%M:%SZ"))


def _union(spans: list[tuple[float, float]]) -> float:
    """Length of what the spans cover together: shards are made side by side."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return covered
