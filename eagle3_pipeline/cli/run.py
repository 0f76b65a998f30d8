"""`eagle3 run`: everything of a recipe without a daemon, in one Dagster run, or in one per wave."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from eagle3_pipeline.cli.checkout import CHECKOUT, add_recipe, dagster_home, lineage_of
from eagle3_pipeline.errors import Eagle3Error, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.parent_death import interrupt_with_parent
from eagle3_pipeline.recipe.file import RECIPES_VARIABLE


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    run = commands.add_parser("run", help="make everything of a recipe, without a daemon")
    add_recipe(run)
    run.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from eagle3_pipeline.serving.overview import servers_in_words
    from eagle3_pipeline.summary import summary

    lineage = lineage_of(options.recipe)
    if not (CHECKOUT / "definitions.py").is_file():
        raise RecipeError(f"no definitions.py in {CHECKOUT}: eagle3 run works from a checkout of the project")
    name = options.recipe
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(dagster_home()),
        "EAGLE3_STORAGE": str(lineage.storage_root),
        RECIPES_VARIABLE: str(Path(name).absolute()) if name.endswith((".yaml", ".yml")) else name,
    }
    began = time.monotonic()
    if lineage.recipe.extraction.waves == 1:
        status = _execute(f"{lineage.recipe.slug}_pipeline", environment)
    else:
        status = _in_waves(lineage, environment)
    minutes = (time.monotonic() - began) / 60
    if status == 0:
        print(f"\n{lineage.recipe.name} is done ({minutes:.1f} minutes):\n\n{summary(lineage)}\n")
        print(f"  To see the graph, the plots and the lineage: EAGLE3_RECIPES={name} make ui")
        return 0
    print(f"\n{lineage.recipe.name} is not finished ({minutes:.1f} minutes); what is complete is kept.")
    print("The same command goes on from there.")
    for words in servers_in_words():
        print(f"\n{words}")
    return status


def _in_waves(lineage: Lineage, environment: dict[str, str]) -> int:
    """Run after run, until the draft is released or one fails."""
    from eagle3_pipeline.wave_runs import next_run

    done = None
    while (run := next_run(lineage)) is not None:
        if run == done:
            raise Eagle3Error(
                f"the run of {run.job} for {run.what} ended well, and the same is still to be done. Did "
                "somebody move files of the storage root meanwhile? Start the command again."
            )
        print(f"\n{run.job}: {run.what}", flush=True)
        if status := _execute(run.job, environment, run.tags):
            return status
        done = run
    return 0


def _execute(job: str, environment: dict[str, str], tags: dict[str, str] | None = None) -> int:
    """Run one Dagster job in a process of its own; a Ctrl-C reaches it too, and it is waited for."""
    # Dagster's command line announces that others will replace it; that is no news of this run.
    python = [sys.executable, "-W", "ignore"]
    argv = [*python, "-m", "dagster", "job", "execute", "-f", "definitions.py", "-j", job]
    argv += ["-c", "resources/console.yaml", *(["--tags", json.dumps(tags)] if tags else [])]
    # When this command is killed, the run is interrupted; else it would work on unseen.
    process = subprocess.Popen(argv, cwd=CHECKOUT, env=environment, preexec_fn=interrupt_with_parent)
    interrupted = False
    while True:
        try:
            status = process.wait()
            return 130 if interrupted else status
        except KeyboardInterrupt:
            interrupted = True
            print("\nstopping; what is complete is kept", file=sys.stderr)
