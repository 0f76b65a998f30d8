"""`eagle3 status`: what of a recipe is made, how far its steps are, and who works on this machine."""

import argparse

from eagle3_pipeline.cli.checkout import add_recipe, lineage_of


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    what = "what is made, how far steps are, which servers run, who holds which GPUs"
    status = commands.add_parser("status", help=what)
    add_recipe(status)
    status.set_defaults(command=_status)


def _status(options: argparse.Namespace) -> int:
    from eagle3_pipeline.progress_file import latest_calls
    from eagle3_pipeline.serving.overview import overview
    from eagle3_pipeline.summary import standing

    lineage = lineage_of(options.recipe)
    progress = "\n".join(f"  {call.step:<20} {call}" for call in latest_calls(lineage.progress))
    print("\n\n".join(part for part in (standing(lineage), progress, overview()) if part))
    return 0
