"""`eagle3 publish`: give a finished release its version, and publish it where its recipe says."""

import argparse

from eagle3_pipeline.cli.checkout import add_recipe, lineage_of


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    publish = commands.add_parser("publish", help="publish a recipe's release, as the recipe says")
    add_recipe(publish)
    publish.add_argument("--dry-run", action="store_true", help="say what would be sent, and send nothing")
    publish.set_defaults(command=_publish)


def _publish(options: argparse.Namespace) -> int:
    from eagle3_pipeline.release.publishing import plan_of_publishing, publish

    lineage = lineage_of(options.recipe)
    if options.dry_run:
        print("\n".join(plan_of_publishing(lineage)))
        return 0
    for what, where in publish(lineage).items():
        print(f"  {what:<9} {where}")
    return 0
