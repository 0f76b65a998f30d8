"""`eagle3 status`: what of a recipe is made, what is missing, and who works on this machine."""

import argparse

from eagle3_pipeline.cli.checkout import add_recipe, lineage_of


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    status = commands.add_parser("status", help="what is made, which servers run, who holds which GPUs")
    add_recipe(status)
    status.set_defaults(command=_status)


def _status(options: argparse.Namespace) -> int:
    from eagle3_pipeline.serving.overview import overview
    from eagle3_pipeline.summary import standing

    print(f"{standing(lineage_of(options.recipe))}\n\n{overview()}")
    return 0
