"""The command `eagle3`: run a recipe to the end, see where it stands, look after servers and shards."""

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle3_pipeline.errors import Busy, Eagle3Error, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.parent_death import interrupt_with_parent
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.recipe.file import DEFAULT_RECIPE, RECIPES_VARIABLE

CHECKOUT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 failed, 2 refused, 130 interrupted."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except Eagle3Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eagle3", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="make everything of a recipe in one Dagster run, without a daemon")
    run.set_defaults(command=_run)
    status = commands.add_parser("status", help="what is made, what is missing, which servers run")
    status.set_defaults(command=_status)
    for sub in (run, status):
        sub.add_argument("--recipe", default=DEFAULT_RECIPE, help="name in recipes/, or a path (%(default)s)")

    server = commands.add_parser("server", help="the vLLM servers of this machine")
    server.add_argument("action", choices=("status", "stop"))
    server.set_defaults(command=_server)

    shards = commands.add_parser("shards", help="hidden-state shards")
    shards.add_argument("action", choices=("inspect",))
    shards.add_argument("path", type=Path)
    shards.add_argument("--verify", action="store_true", help="compare every byte with its checksum")
    shards.set_defaults(command=_shards)
    return parser


def _lineage(name: str) -> Lineage:
    recipe = load_recipe(name, CHECKOUT / "recipes")
    return Lineage(recipe, Path(os.environ.get("EAGLE3_STORAGE", CHECKOUT / "data")).absolute())


def _run(options: argparse.Namespace) -> int:
    from eagle3_pipeline.summary import summary

    lineage = _lineage(options.recipe)
    if not (CHECKOUT / "definitions.py").is_file():
        raise RecipeError(f"no definitions.py in {CHECKOUT}: eagle3 run works from a checkout of the project")
    home = Path(os.environ.get("DAGSTER_HOME", CHECKOUT / ".dagster")).absolute()
    home.mkdir(parents=True, exist_ok=True)
    settings = home / "dagster.yaml"
    if settings.is_symlink():
        settings.unlink()  # it may point to where the checkout lay before
    if not settings.exists():
        settings.symlink_to(os.path.relpath(CHECKOUT / "dagster.yaml", home))
    name = options.recipe
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "EAGLE3_STORAGE": str(lineage.storage_root),
        RECIPES_VARIABLE: str(Path(name).absolute()) if name.endswith((".yaml", ".yml")) else name,
    }
    began = time.monotonic()
    status = _execute(f"{lineage.recipe.slug}_pipeline", environment)
    minutes = (time.monotonic() - began) / 60
    if status == 0:
        print(f"\n{lineage.recipe.name} is done ({minutes:.1f} minutes):\n\n{summary(lineage)}\n")
        print(f"  To see the graph, the plots and the lineage: EAGLE3_RECIPES={name} make ui")
        return 0
    print(f"\n{lineage.recipe.name} is not finished ({minutes:.1f} minutes); what is complete is kept.")
    print("The same command goes on from there.")
    for line in _servers():
        print(line)
    return status


def _execute(job: str, environment: dict[str, str]) -> int:
    """Run one Dagster job in a process of its own; a Ctrl-C reaches it too, and it is waited for."""
    # Dagster's command line announces that others will replace it; that is no news of this run.
    python = [sys.executable, "-W", "ignore"]
    argv = [*python, "-m", "dagster", "job", "execute", "-f", "definitions.py", "-j", job]
    argv += ["-c", "resources/console.yaml"]
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


def _status(options: argparse.Namespace) -> int:
    from eagle3_pipeline.summary import standing

    print(standing(_lineage(options.recipe)))
    for line in _servers():
        print(line)
    return 0


def _servers() -> list[str]:
    from eagle3_pipeline.serving.server import running_servers
    from eagle3_pipeline.serving.watcher import stops_at

    lines = []
    for record in running_servers():
        ends = time.strftime("%H:%M:%S", time.localtime(stops_at(record)))
        lines.append(
            f"  {record}: stops by itself at {ends} unless it is used before, or by eagle3 server stop"
        )
    return lines


def _server(options: argparse.Namespace) -> int:
    from eagle3_pipeline.serving.server import running_servers, stop_if_unused

    if options.action == "status":
        print("\n".join(_servers()) or "no server of ours runs on this machine")
        return 0
    for record in running_servers():
        try:
            print(f"  {record}: {'stopped' if stop_if_unused(record) else 'in use, left alone'}")
        except Busy as error:  # of another user or container; the others can be stopped all the same
            print(f"  {record}: left alone. {error}")
    return 0


def _shards(options: argparse.Namespace) -> int:
    from eagle3_pipeline.shards.inspection import inspect_shards

    print(inspect_shards(options.path, verify=options.verify))
    return 0


if __name__ == "__main__":
    sys.exit(main())
