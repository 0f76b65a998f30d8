"""What the acceptance report and the release still take: server starts, replies and hours.

The pace of a request is that of the last report of this recipe. Before the first one it is that of a request
in generation, among many others: with fewer of them in flight each is faster, so the hours are at most so
many. What a report that was cut short has measured already is not looked at.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.evaluation.effort import Effort, effort_of_release, effort_of_report
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import MANIFEST_NAME, Manifest, read_manifest
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.serving.loading import seconds_to_load


@dataclass(frozen=True)
class Pace:
    """Tokens a second of one request in flight, and where the number comes from, in words."""

    tokens_per_second: float
    source: str
    is_least: bool
    """Whether the report's requests are likely faster."""


@dataclass(frozen=True)
class ReportForecast:
    """`report` and `release` are None where they are made, `loading` and `pace` where nothing is measured."""

    report: Effort | None
    release: Effort | None
    loading: float | None
    """Seconds of one server start."""
    pace: Pace | None

    def seconds(self, effort: Effort) -> float | None:
        """How long one of both takes, server starts included; None where that was not measured yet."""
        if self.loading is None or self.pace is None:
            return None
        return len(effort.servers) * self.loading + effort.seconds(self.pace.tokens_per_second)


def forecast_report(lineage: Lineage, completions: list[int]) -> ReportForecast:
    """What is known now; `completions` are the tokens of those that are made. Raises BadInput (a set)."""
    recipe = lineage.recipe
    prompts, reply = _prompts(recipe), _mean(completions, recipe.evaluation.max_completion_tokens)
    report = release = None
    if not _is_reported(lineage):
        judged = _mean(completions, recipe.generation.max_completion_tokens)
        report = effort_of_report(recipe, prompts, reply, judged)
    if lineage.released() is None:
        release = effort_of_release(recipe, prompts, reply)
    return ReportForecast(report, release, seconds_to_load(lineage.logs), _pace(lineage))


def _is_reported(lineage: Lineage) -> bool:
    try:
        return lineage.acceptance_report().manifest() is not None
    except MissingInput:  # there is no draft yet
        return False


def _prompts(recipe: Recipe) -> dict[str, int]:
    """How many prompts each set has: one that stands twice is asked once."""
    from eagle3_pipeline.prompts.evaluation import read_set

    return {one.name: len({prompt.prompt_id for prompt in read_set(one)}) for one in recipe.evaluation.sets}


def _mean(completions: list[int], longest: int) -> float:
    """The expected length of a reply of at most `longest` tokens: half of them before there are samples."""
    if not completions:
        return max(longest // 2, 1)
    return sum(min(one, longest) for one in completions) / len(completions)


def _pace(lineage: Lineage) -> Pace | None:
    if reports := sorted(_manifests(lineage.folder / "acceptance_report"), key=lambda one: one.made_at):
        facts = reports[-1].facts
        slowest = max(facts["seconds_per_output_token_with"], facts["seconds_per_output_token_without"])
        return Pace(1 / slowest, "as in the last report", is_least=False)
    made = _manifests(lineage.folder / "synthetic_samples")
    histories = [found for one in made if (found := one.facts.get("server_history"))]
    running = [number for one in histories for number in one["running"]]
    tokens = sum(number for one in histories for number in one["tokens_per_second"])
    if not tokens or not any(running):
        return None
    among = f"as in generation, with {sum(running) / len(running):.0f} at a time"
    return Pace(tokens / sum(running), among, is_least=True)


def _manifests(folder: Path) -> Iterator[Manifest]:
    return (read_manifest(path) for path in folder.glob(f"**/{MANIFEST_NAME}"))
