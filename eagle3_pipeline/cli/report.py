"""`eagle3 report`: what the draft of a recipe is worth, and where its page is."""

import argparse
import sys
import webbrowser

from eagle3_pipeline.cli.checkout import add_recipe, lineage_of


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    report = commands.add_parser("report", help="what the draft of a recipe is worth, and its page")
    add_recipe(report)
    report.add_argument("--open", action="store_true", help="open the page in the browser")
    report.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    """Status 1 where the page was to be opened and there is no browser."""
    from eagle3_pipeline.evaluation.page import PAGE_NAME
    from eagle3_pipeline.evaluation.report import report_table

    place = lineage_of(options.recipe).acceptance_report()
    page = place.folder / PAGE_NAME
    print(report_table(place.require().facts))
    print(f"  as a page: {page}")
    if options.open and not webbrowser.open(page.as_uri()):
        print(f"found no browser here. Open {page} by hand, or copy it: it is one file.", file=sys.stderr)
        return 1
    return 0
