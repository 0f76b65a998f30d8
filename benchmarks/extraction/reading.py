"""Reads all samples of some shards once, in random order, as training does, for memory.py.

    python -m benchmarks.extraction.reading RECIPE.yaml STORAGE --first 4

Prints one JSON line: seconds, samples, tokens.
"""

import argparse
import json
import random
import time
from pathlib import Path

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.shards.reader import ShardReader


def main() -> None:
    """Read as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("storage", type=Path)
    parser.add_argument("--first", type=int, help="number of shards, by default all")
    options = parser.parse_args()
    lineage = Lineage(load_recipe(str(options.recipe), options.recipe.parent), options.storage)
    shards = lineage.recipe.shards[: options.first]
    began = time.monotonic()
    reader = ShardReader([lineage.hidden_state_shards(shard).folder for shard in shards])
    order = list(range(len(reader)))
    random.Random(0).shuffle(order)
    tokens = sum(len(reader[index]["hidden_states"]) for index in order)
    print(json.dumps({"seconds": time.monotonic() - began, "samples": len(order), "tokens": tokens}))


if __name__ == "__main__":
    main()
