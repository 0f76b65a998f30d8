"""The pictures of an acceptance report: for the page on both backgrounds, for Dagster on a card."""

from collections.abc import Mapping
from typing import Any

from eagle3_pipeline.evaluation.tables import by_set
from eagle3_pipeline.plots import CARD, Look, grouped_bars, ratios


def position_picture(report: Mapping[str, Any], look: Look = CARD) -> bytes:
    """The share of drafts accepted at each position, over all sets; the base draft's beside it."""
    series = {"draft": report["acceptance_by_position"]}
    if report["base"] is not None:
        series["base draft"] = report["base"]["acceptance_by_position"]
    return grouped_bars(series, "Share of drafts accepted at each position", "speculated token", look)


def speedup_picture(report: Mapping[str, Any], look: Look = CARD) -> bytes:
    """The speed-up on each set and on all together, with its spread over the repeats."""
    rows = {
        name: (numbers["speedup_least"], numbers["speedup"], numbers["speedup_most"])
        for name, numbers in by_set(report)
    }
    return ratios(rows, "Speed-up by set, with its spread over the repeats", "x without the draft", look)
