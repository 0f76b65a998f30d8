"""The tables of an acceptance report, as rows of text by column: for the page and for Dagster."""

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3_pipeline.evaluation.agreement import rows_of_comparison

NONE = "–"
"""Stands where there is no number."""

Rows = list[dict[str, str]]
Report = Mapping[str, Any]


def tables_of(report: Report) -> dict[str, Rows]:
    """All tables by name; those of what was not measured have no rows."""
    return {
        "acceptance_by_set": rows_of_acceptance(report),
        "speed_by_set": rows_of_speed(report),
        "beside_the_base": rows_of_base(report),
        "by_settings": rows_of_grid(report),
        "simulated_and_served": rows_of_comparison(report),
    }


def rows_of_acceptance(report: Report) -> Rows:
    """Acceptance of each set, and of all together."""
    return [
        {
            "set": name,
            "prompts": str(numbers["prompts"]),
            "drafts": f"{numbers['drafts']:,}",
            "length": fixed(numbers["acceptance_length"]),
            **{f"pos {k}": fixed(share) for k, share in enumerate(numbers["acceptance_by_position"], 1)},
            "same replies": percent(numbers["identical_share"]),
        }
        for name, numbers in by_set(report)
    ]


def rows_of_speed(report: Report) -> Rows:
    """Speed of each set with the draft and without it, and of all together."""
    return [
        {
            "set": name,
            **_speed(numbers),
            "ms a token with": fixed(1000 * numbers["seconds_per_output_token_with"], 1),
            "ms without": fixed(1000 * numbers["seconds_per_output_token_without"], 1),
        }
        for name, numbers in by_set(report)
    ]


def rows_of_base(report: Report) -> Rows:
    """The draft beside the base draft, set by set; none where there is no base draft."""
    if report["base"] is None:
        return []
    return [
        {
            "set": name,
            "length": fixed(draft["acceptance_length"]),
            "of the base": fixed(base["acceptance_length"]),
            "ratio": fixed(draft["acceptance_length"] / base["acceptance_length"]),
            "speed-up": fixed(draft["speedup"], 2),
            "speed-up of the base": fixed(base["speedup"], 2),
        }
        for (name, draft), (_, base) in zip(by_set(report), by_set(report["base"]), strict=True)
    ]


def rows_of_grid(report: Report) -> Rows:
    """The cells of the grid, the headline first."""
    return [
        {
            "tokens a draft": str(cell["speculative_tokens"]),
            "temperature": f"{cell['temperature']:g}",
            "in flight": str(cell["in_flight"]),
            "length": fixed(cell["acceptance_length"]),
            "by position": " / ".join(fixed(share, 2) for share in cell["acceptance_by_position"]),
            **_speed(cell),
        }
        for cell in report["grid"]
    ]


def by_set(numbers: Report) -> Iterator[tuple[str, Report]]:
    """The numbers of each set, and of all of them together."""
    yield from numbers["sets"].items()
    yield "all", numbers


def spread(numbers: Report) -> str:
    """The least and the most speed-up of the repeats."""
    least, most = numbers["speedup_least"], numbers["speedup_most"]
    return f"{least:.2f} to {most:.2f}" if least < most else NONE


def _speed(numbers: Report) -> dict[str, str]:
    return {
        "tok/s with": fixed(numbers["tokens_per_second_with"], 1),
        "without": fixed(numbers["tokens_per_second_without"], 1),
        "speed-up": fixed(numbers["speedup"], 2),
        "spread": spread(numbers),
    }


def fixed(number: float | None, digits: int = 3) -> str:
    """A number with so many digits behind the point."""
    return NONE if number is None else f"{number:.{digits}f}"


def percent(share: float | None) -> str:
    """A share in whole percent."""
    return NONE if share is None else f"{share:.0%}"
