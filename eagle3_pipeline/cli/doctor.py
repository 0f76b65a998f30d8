"""`eagle3 doctor`: what is wrong with this machine or with a recipe on it, and what to do."""

import argparse
from collections import Counter

from eagle3_pipeline.cli.checkout import add_recipe, lineage_of


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    doctor = commands.add_parser("doctor", help="what is wrong here, each with what to do; changes nothing")
    add_recipe(doctor)
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    """Status 0 without problems, 1 with."""
    from eagle3_pipeline.doctor import Mark, examine

    marks: Counter[Mark] = Counter()
    for finding in examine(lambda: lineage_of(options.recipe)):
        print(finding, flush=True)
        marks[finding.mark] += 1
    print("\n" + ", ".join(f"{marks[mark]} {mark}" for mark in Mark))
    return 1 if marks[Mark.PROBLEM] else 0
