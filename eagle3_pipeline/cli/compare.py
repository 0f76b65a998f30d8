"""`eagle3 compare`: two acceptance reports beside each other."""

import argparse
from pathlib import Path
from typing import Any

from eagle3_pipeline.cli.checkout import lineage_of


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    compare = commands.add_parser("compare", help="two reports beside each other, and what is beyond chance")
    for name in ("A", "B"):
        compare.add_argument(name, help="a recipe, by name or path, or the report.json of an older report")
    compare.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> int:
    from eagle3_pipeline.evaluation.comparison import comparison_table

    print(comparison_table(_report(options.A), _report(options.B)), end="")
    return 0


def _report(name: str) -> dict[str, Any]:
    from eagle3_pipeline.evaluation.comparison import read_report

    if name.endswith(".json"):
        return read_report(Path(name))
    place = lineage_of(name).acceptance_report()
    place.require()
    return read_report(place.folder / "report.json")
