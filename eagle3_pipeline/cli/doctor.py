"""`eagle3 doctor`: what is wrong with this machine or with a recipe on it, and what to do."""

import argparse
import os
import subprocess
import sys
from collections import Counter

from eagle3_pipeline.cli.checkout import CHECKOUT, add_recipe, dagster_home, lineage_of


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    doctor = commands.add_parser("doctor", help="what is wrong here, each with what to do")
    add_recipe(doctor)
    doctor.add_argument(
        "--repair",
        action="store_true",
        help="first end and forget what servers left that are gone, and mark lost Dagster runs as failed",
    )
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    """Status 0 without problems, 1 with."""
    from eagle3_pipeline.doctor import Mark, examine, repair

    if options.repair:
        for finding in repair():
            print(finding, flush=True)
        _report_lost_runs(options.recipe)
        print()
    marks: Counter[Mark] = Counter()
    for finding in examine(lambda: lineage_of(options.recipe)):
        print(finding, flush=True)
        marks[finding.mark] += 1
    print("\n" + ", ".join(f"{marks[mark]} {mark}" for mark in Mark))
    return 1 if marks[Mark.PROBLEM] else 0


def _report_lost_runs(recipe: str) -> None:
    """Have the code location do it, in a process of its own: only that knows Dagster."""
    root = lineage_of(recipe).storage_root
    environment = {**os.environ, "DAGSTER_HOME": str(dagster_home())}
    argv = [sys.executable, "-W", "ignore", "-m", "sensors.lost_runs", str(root)]
    subprocess.run(argv, cwd=CHECKOUT, env=environment, check=False)
