"""report.html: the acceptance report as one page for people, without network, for light and dark screens.

evaluate_draft makes the last facts of a report and writes the page beside report.json:

    report |= {"measured": measured(lineage)}
    write_atomic(folder / "report.html", report_page(report))
"""

from collections.abc import Mapping
from typing import Any


def report_page(report: Mapping[str, Any]) -> str:
    """The page of a report, as HTML. Takes the facts or report.json, with `measured` (see measured.py)."""
    raise NotImplementedError
