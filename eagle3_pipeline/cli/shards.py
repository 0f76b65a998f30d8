"""`eagle3 shards`: what a shard of hidden states holds."""

import argparse
from pathlib import Path


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    shards = commands.add_parser("shards", help="hidden-state shards")
    shards.add_argument("action", choices=("inspect",))
    shards.add_argument("path", type=Path)
    shards.add_argument("--verify", action="store_true", help="compare every byte with its checksum")
    shards.set_defaults(command=_shards)


def _shards(options: argparse.Namespace) -> int:
    from eagle3_pipeline.shards.inspection import inspect_shards

    print(inspect_shards(options.path, verify=options.verify))
    return 0
