"""The gate: each number of the report against its bound in the recipe."""

import math
from collections.abc import Mapping
from typing import Any

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.evaluation.agreement import explanation
from eagle3_pipeline.recipe.release import Bound
from eagle3_pipeline.recipe.settings import Recipe

_TRAIN_MORE = "train on more or broader prompts, or longer (prompts.count, training.epochs)"
_WAY_OUT = {
    "acceptance_length": _TRAIN_MORE,
    "position_0": _TRAIN_MORE,
    "speedup": "a longer acceptance, fewer speculative tokens or fewer requests in flight make it larger",
    "to_base": "training took more from the base draft than it gave: lower training.learning_rate, or train "
    "on more or broader prompts (prompts.count)",
}


def check_gate(recipe: Recipe, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each bound of `recipe` with what `report`, the facts of acceptance_report, says of it.

    One entry has `number`, `set` (None for all), `measured`, `at_least` and `passed`; that of a speed-up its
    `least` and `most` over the repeats, too. Raises QualityError with all bounds if one is missed; a number
    that is absent or not finite misses its bound.
    """
    bounds = recipe.release.bounds(has_base=recipe.base_draft is not None)
    entries = [_judge(bound, report) for bound in bounds]
    missed = sum(not entry["passed"] for entry in entries)
    if missed:
        head = f"the draft is not released: {missed} of {len(bounds)} bounds of release.gate missed"
        lines = [_line(bound, entry) for bound, entry in zip(bounds, entries, strict=True)]
        if report.get("simulation_agrees") is False:  # then the bounds may be missed for another reason
            lines.append(explanation(report))
        raise QualityError("\n  ".join([head, *lines]))
    return entries


def _judge(bound: Bound, report: Mapping[str, Any]) -> dict[str, Any]:
    numbers = _numbers(report, bound)
    measured = _measured(bound, numbers, _numbers(report.get("base") or {}, bound))
    passed = measured is not None and measured >= bound.at_least
    entry = {"number": bound.number, "set": bound.set, "measured": measured, "at_least": bound.at_least}
    if bound.number == "speedup":
        entry |= {"least": numbers.get("speedup_least"), "most": numbers.get("speedup_most")}
    return {**entry, "passed": passed}


def _numbers(report: Mapping[str, Any], bound: Bound) -> Mapping[str, Any]:
    """Of one set, or of all together; empty where they are missing."""
    found: Mapping[str, Any] = report if bound.set is None else report.get("sets", {}).get(bound.set, {})
    return found


def _measured(bound: Bound, numbers: Mapping[str, Any], base: Mapping[str, Any]) -> float | None:
    if bound.number == "position_0":
        value = next(iter(numbers.get("acceptance_by_position", ())), None)
    elif bound.number == "to_base":
        length, of_base = numbers.get("acceptance_length"), base.get("acceptance_length")
        value = length / of_base if length and of_base else None
    else:
        value = numbers.get(bound.number)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _line(bound: Bound, entry: Mapping[str, Any]) -> str:
    measured = entry["measured"]
    found = "not measured" if measured is None else f"{measured:.3f}"
    if measured is not None and entry.get("least") is not None:
        found += f" ({entry['least']:.3f} to {entry['most']:.3f} over the repeats)"
    line = f"{bound.name} is {found}, at least {bound.at_least:g}"
    return line if entry["passed"] else f"{line}: MISSED; {_WAY_OUT[bound.number]}"
