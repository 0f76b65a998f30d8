"""`eagle3 plan`: tokens, bytes, waves and hours of a recipe, and what does not fit."""

import argparse
from typing import TYPE_CHECKING

from eagle3_pipeline.cli.checkout import add_recipe, lineage_of

if TYPE_CHECKING:
    from eagle3_pipeline.evaluation.effort import Effort
    from eagle3_pipeline.forecast import Forecast, Phase
    from eagle3_pipeline.report_forecast import ReportForecast


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    plan = commands.add_parser(
        "plan", help="tokens, bytes, waves and hours of a recipe, and what does not fit"
    )
    add_recipe(plan)
    plan.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> int:
    from eagle3_pipeline.forecast import forecast

    lineage = lineage_of(options.recipe)
    found = forecast(lineage)
    rows = [*_amounts(found), *_waves(found), *_hours(found)]
    rows.append(("time of report", _time_of_effort(found.report, found.report.report)))
    rows.append(("time of release", _time_of_effort(found.report, found.report.release)))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows))
    return 0


def _amounts(found: "Forecast") -> list[tuple[str, str]]:
    from eagle3_pipeline.samples.state_room import gib

    plan, room = found.fit.plan, found.fit.room
    forms = plan.forms()
    fits = "fits" if found.complaint is None else f"does not fit. {found.complaint}"
    rows = [
        ("samples", f"{found.samples_made} of {len(plan.shards)} shards are made"),
        ("tokens", f"{plan.tokens:,} to extract ({found.source})"),
        *((f"states, {name}", gib(count)) for name, count in forms.items()),
        ("room", f"{gib(room.bytes)} for states: {room.why}"),
        ("this recipe", f"{plan.layout.precision}, kept: {plan.layout.kept}; {fits}"),
    ]
    return rows


def _waves(found: "Forecast") -> list[tuple[str, str]]:
    if len(found.waves) == 1:
        return [("waves", "1: all states at once")]
    said = "decided by sample_audit" if found.is_decided else "as it looks now; sample_audit decides"
    sizes = " + ".join(str(len(wave)) for wave in found.waves)
    return [("waves", f"{len(found.waves)} ({said}), of {sizes} shards"), ("passes", str(found.passes))]


def _hours(found: "Forecast") -> list[tuple[str, str]]:
    rows = [(f"time of {phase.name}", _time_of(phase)) for phase in found.phases]
    if found.passes > 1:
        again = found.extraction_again
        rows.append(("  of this, again", f"{_time_of(again)}: each pass after the first extracts every wave"))
    return rows


def _time_of(phase: "Phase") -> str:
    from eagle3_pipeline.duration import in_words

    if phase.tokens_left == 0:
        return "done"
    left = f"{phase.tokens_left:,} tokens are left"
    if phase.seconds_left is None or phase.tokens_per_second is None:
        return f"not measured yet; {left}"
    return f"{in_words(phase.seconds_left)}: {left}, {phase.tokens_per_second:,.0f} a second so far"


def _time_of_effort(found: "ReportForecast", effort: "Effort | None") -> str:
    from eagle3_pipeline.duration import in_words

    if effort is None:
        return "done"
    starts = f"{len(effort.servers)} server {'start' if len(effort.servers) == 1 else 'starts'}"
    names = ", ".join(effort.servers)
    replies = f"{effort.replies:,} replies, {effort.tokens:,.0f} tokens"
    if (seconds := found.seconds(effort)) is None or found.loading is None or found.pace is None:
        return f"not measured yet; {starts} ({names}), {replies}"
    pace = found.pace
    return (
        f"{'at most' if pace.is_least else 'about'} {in_words(seconds)}: {starts} ({names}) of "
        f"{in_words(found.loading)}, {replies} at {pace.tokens_per_second:,.0f} a second each, {pace.source}"
    )
