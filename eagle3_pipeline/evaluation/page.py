"""report.html: the acceptance report as one page for people, without network, for light and dark screens.

It is page.html.jinja, filled in: whatever a recipe or a server put into a report is escaped there.
"""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagle3_pipeline.evaluation.agreement import explanation
from eagle3_pipeline.evaluation.pictures import position_picture, speedup_picture
from eagle3_pipeline.evaluation.report import greedy_note, sampling_note, verdict
from eagle3_pipeline.evaluation.tables import fixed, percent, spread, tables_of
from eagle3_pipeline.plots import DARK, LIGHT, Look, data_uri

PAGE_NAME = "report.html"
"""The page's file beside report.json."""
_NOT_GREEDY = "Replies are not compared: nothing was measured at temperature 0."


def report_page(report: dict[str, Any]) -> str:
    """The page of a report, as HTML. Takes the facts or report.json, with `measured` (see measured.py)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(fixed=fixed, percent=percent, shell=shlex.join)
    return environment.get_template("page.html.jinja").render(
        report=report,
        measured=report["measured"],
        verdict=verdict(report),
        sampling=sampling_note(report),
        spread=spread(report),
        tables=tables_of(report),
        greedy=greedy_note(report["greedy"]) if report["greedy"] is not None else _NOT_GREEDY,
        explanation=explanation(report),
        pictures={
            "Acceptance by position": _picture(position_picture, report),
            "Speed-up by set": _picture(speedup_picture, report),
        },
    )


def _picture(draw: Callable[[Mapping[str, Any], Look], bytes], report: Mapping[str, Any]) -> dict[str, str]:
    """Addresses of the picture for both backgrounds."""
    return {"light": data_uri(draw(report, LIGHT), LIGHT), "dark": data_uri(draw(report, DARK), DARK)}
