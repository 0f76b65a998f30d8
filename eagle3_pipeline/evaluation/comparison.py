"""Two acceptance reports beside each other: what differs, and whether by more than chance.

Acceptance is a mean over n drafts, of which the share p_k had its k-th token accepted (p_1 >= p_2 >= ...):

    accepted tokens of a draft    mean  sum of p_k    mean square  sum of (2 k - 1) p_k
    its k-th token                mean  p_k           mean square  p_k

A difference beyond three standard errors is called one. Repeats of greedy replies draft the same again, so n
is the number of drafts of one repeat. Drafts of one reply are alike, which three errors leave room for: an
easy reply is easy for both, since both answer the same prompts with the same target. Of a speed-up the
repeats themselves tell the spread: beyond it are two whose ranges do not meet.

Speeds are compared where machine and server settings are the same; acceptance everywhere.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import BadInput, DamagedFile, MissingInput
from eagle3_pipeline.evaluation.report import aligned
from eagle3_pipeline.evaluation.tables import NONE, by_set, fixed

Report = Mapping[str, Any]

_ERRORS = 3.0
# What both reports were measured with, by the setting of the recipe that says it.
_SETTINGS = {
    "speculative_tokens": "speculative_tokens",
    "temperature": "temperature",
    "in_flight": "concurrency",
    "max_completion_tokens": "max_completion_tokens",
}
_SPEEDS = {
    "tokens_per_second_with": "tokens/s with",
    "tokens_per_second_without": "tokens/s without",
}


@dataclass(frozen=True)
class Compared:
    """One number of both reports."""

    where: str
    """A set, `all`, or a cell of the grid."""
    number: str
    first: float
    second: float
    beyond: bool | None
    """Whether the difference is beyond the spread; None where the spread is not known."""

    @property
    def row(self) -> dict[str, str]:
        """As a row of text."""
        digits = 3 if self.first < 10 else 1
        return {
            "number": f"{self.where}: {self.number}",
            "A": fixed(self.first, digits),
            "B": fixed(self.second, digits),
            "difference": f"{self.second - self.first:+.{digits}f}",
            "in %": f"{self.second / self.first - 1:+.1%}" if self.first else NONE,
            "beyond the spread": {True: "yes", False: "no", None: NONE}[self.beyond],
        }


def read_report(path: Path) -> dict[str, Any]:
    """A report.json; raises MissingInput and DamagedFile."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise MissingInput(f"no file {path}. Expected a recipe, or the report.json of a report.") from error
    except ValueError as error:
        raise DamagedFile(f"{path} is not JSON ({error}), expected a report.json.") from error
    if not isinstance(found, dict) or not found.keys() >= {"measured", "sets", "grid"}:
        raise DamagedFile(f"{path} is no acceptance report, expected the report.json of acceptance_report.")
    return found


def compare_reports(first: Report, second: Report) -> list[Compared]:
    """All numbers that both have, by set and by cell of the grid; BadInput where they cannot be compared."""
    if reasons := list(_refusals(first, second)):
        raise BadInput(
            "the reports cannot be compared:\n"
            + "\n".join(f"  {reason}" for reason in reasons)
            + "\nMeasure both drafts with the same target, sets and settings of evaluation."
        )
    speeds = not _other_conditions(first, second)
    pairs = list(zip(by_set(first), by_set(second), strict=True))
    rows = [row for (name, one), (_, other) in pairs for row in _rows(name, one, other, speeds)]
    others = {_cell_name(cell): cell for cell in second["grid"][1:]}
    for cell in first["grid"][1:]:
        if (name := _cell_name(cell)) in others:
            rows += _rows(name, cell, others[name], speeds)
    return rows


def comparison_table(first: Report, second: Report) -> str:
    """The comparison for a terminal; raises BadInput."""
    table = aligned([one.row for one in compare_reports(first, second)])
    whose = [f"{letter}  {_whose(one['measured'])}" for letter, one in (("A", first), ("B", second))]
    return "\n".join([*whose, "", table, "", *_notes(first, second)]) + "\n"


def _refusals(first: Report, second: Report) -> Iterator[str]:
    one, other = first["measured"], second["measured"]
    if one["target"]["content"] != other["target"]["content"]:
        targets = [f"{side['target']['name']} ({side['target']['content']})" for side in (one, other)]
        yield f"the target is {targets[0]} in A and {targets[1]} in B"
    for fact, setting in _SETTINGS.items():
        if first[fact] != second[fact]:
            yield f"evaluation.{setting} is {first[fact]:g} in A and {second[fact]:g} in B"
    if list(first["sets"]) != list(second["sets"]):
        yield f"the sets are {', '.join(first['sets'])} in A and {', '.join(second['sets'])} in B"
        return
    for name in first["sets"]:
        if one["sets"][name] != other["sets"][name]:
            yield f"the set {name} has other prompts in A than in B"
        elif (answered := first["sets"][name]["prompts"]) != (also := second["sets"][name]["prompts"]):
            yield f"of the set {name} {answered} prompts were answered in A and {also} in B"


def _other_conditions(first: Report, second: Report) -> list[str]:
    """In what the conditions of both speeds differ."""
    one, other = first["measured"], second["measured"]
    found = _differences(one["machine"], other["machine"])
    if one["server"]["settings"] != other["server"]["settings"]:
        found.append("settings of server.evaluation")
    return found


def _differences(one: Report, other: Report) -> list[str]:
    return [
        f"{name} {one.get(name, 'none')} and {other.get(name, 'none')}"
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    ]


def _rows(where: str, one: Report, other: Report, speeds: bool) -> Iterator[Compared]:
    lengths = one["acceptance_length"], other["acceptance_length"]
    beyond = abs(lengths[0] - lengths[1]) > _ERRORS * math.hypot(_length_error(one), _length_error(other))
    yield Compared(where, "acceptance length", *lengths, beyond)
    shares = zip(one["acceptance_by_position"], other["acceptance_by_position"], strict=True)
    for position, pair in enumerate(shares, 1):
        errors = [_error(share, share, numbers) for share, numbers in zip(pair, (one, other), strict=True)]
        beyond = abs(pair[0] - pair[1]) > _ERRORS * math.hypot(*errors)
        yield Compared(where, f"position {position}", *pair, beyond)
    if speeds:
        yield Compared(where, "speed-up", one["speedup"], other["speedup"], _ranges_part(one, other))
        for fact, name in _SPEEDS.items():
            yield Compared(where, name, one[fact], other[fact], None)


def _length_error(numbers: Report) -> float:
    shares = numbers["acceptance_by_position"]
    square = sum((2 * k - 1) * share for k, share in enumerate(shares, 1))
    return _error(sum(shares), square, numbers)


def _error(mean: float, mean_square: float, numbers: Report) -> float:
    """Standard error of a mean over the drafts of one repeat; cells of the grid have no repeats."""
    drafts = numbers["drafts"] / numbers.get("repeats", 1)
    return math.sqrt(max(0.0, mean_square - mean**2) / drafts)


def _ranges_part(one: Report, other: Report) -> bool | None:
    """Whether the ranges of the speed-ups do not meet; None where one of them was measured once."""
    ranges: list[tuple[float, float]] = [
        (numbers["speedup_least"], numbers["speedup_most"]) for numbers in (one, other)
    ]
    if any(least == most for least, most in ranges):
        return None
    return max(least for least, _ in ranges) > min(most for _, most in ranges)


def _cell_name(cell: Report) -> str:
    return f"{cell['speculative_tokens']} tokens, T {cell['temperature']:g}, {cell['in_flight']} in flight"


def _whose(measured: Report) -> str:
    return (
        f"{measured['recipe']}: draft {measured['draft']} for {measured['target']['name']}, measured "
        f"{measured['at']} on {measured['machine']['host']}"
    )


def _notes(first: Report, second: Report) -> list[str]:
    notes = [
        f"Acceptance beyond the spread: more than {_ERRORS:g} standard errors over the drafts of one repeat. "
        "Speed-up: the ranges over the repeats do not meet."
    ]
    if differ := _other_conditions(first, second):
        notes.append(f"Speeds are not compared, their conditions differ: {'; '.join(differ)}.")
    versions = (
        {"server": one["server"]["vllm"], **one["versions"]}
        for one in (first["measured"], second["measured"])
    )
    if differ := _differences(*versions):
        notes.append(f"Versions differ: {'; '.join(differ)}.")
    return notes
