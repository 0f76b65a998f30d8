"""The command `eagle3`: plan a recipe, run it, see where it stands and what came out, look after servers.

One file per command; each adds itself to the parser and imports what it works with only when it is called.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence

from eagle3_pipeline.cli import compare, doctor, plan, publish, report, run, server, shards, status
from eagle3_pipeline.errors import Eagle3Error


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 failed, 2 refused, 130 interrupted."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for client in ("httpx", "httpx2"):  # ours, and the Hub's
        logging.getLogger(client).setLevel(logging.WARNING)
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except Eagle3Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `eagle3 ... | head`: there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    what = "Plan a recipe, run it, see where it stands and what came out, look after servers."
    parser = argparse.ArgumentParser(prog="eagle3", description=what)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (run, plan, status, report, compare, publish, doctor, server, shards):
        command.add(commands)
    return parser
