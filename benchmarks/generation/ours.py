"""This project's step as a process of its own, so that its memory and CPU can be measured.

    python -m benchmarks.generation.ours RECIPE.yaml STORAGE --base-url URL --model NAME

Prints one JSON line: seconds from the opening of the server to the last manifest, samples and completion
tokens. `--shard-by-shard` waits for each shard before it begins the next, as a partitioned asset would that
knew no ranges; `--first N` takes the first N shards only.
"""

import argparse
import importlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.generation.load import Running
from eagle3_pipeline.generation.collection import collect_samples
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.recipe import load_recipe

_LATE_IMPORTS = ("eagle3_pipeline.generation.client", "pyarrow.parquet", "eagle3_pipeline.serving.metrics")


def collect(lineage: Lineage, running: Running, rounds: Sequence[Sequence[str]]) -> dict[str, float]:
    """Make the shards of each round, one round after the other; returns what is printed."""
    opened: list[float] = []

    @contextmanager
    def server() -> Iterator[Running]:
        opened.append(time.monotonic())
        yield running

    def on_shard(shard: str, manifest: Manifest) -> None:
        return None

    made = [one for shards in rounds for one in collect_samples(lineage, shards, server, on_shard)]
    return {
        "seconds": time.monotonic() - opened[0],
        "samples": sum(one.facts["samples"] for one in made),
        "completion_tokens": sum(one.facts["completion_tokens"] for one in made),
    }


def main() -> None:
    """Collect as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("storage", type=Path)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--shard-by-shard", action="store_true")
    parser.add_argument("--first", type=int, help="number of shards, by default all")
    options = parser.parse_args()
    for name in _LATE_IMPORTS:  # else they would be in the seconds, and theirs are not
        importlib.import_module(name)
    lineage = Lineage(load_recipe(str(options.recipe), options.recipe.parent), options.storage)
    shards = lineage.recipe.shards[: options.first]
    rounds = [[shard] for shard in shards] if options.shard_by_shard else [list(shards)]
    print(json.dumps(collect(lineage, Running(options.base_url, options.model), rounds)))


if __name__ == "__main__":
    main()
