"""This project's extraction as a process of its own, so that its memory and CPU can be measured.

    python -m benchmarks.extraction.ours RECIPE.yaml STORAGE

Attaches to the extraction server of the recipe, which should run already, and prints one JSON line: seconds
and CPU from the server's opening to the last manifest, samples and tokens. `--first N` takes the first N
shards only. With `--server FINGERPRINT` it fails, and does not wait, where the recipe wants another server.
`proof_seconds` of these seconds prove the server on a few samples, which is done once after its start.
"""

import argparse
import importlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3_pipeline.extraction import run
from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.serving.server import RunningServer, open_server
from eagle3_pipeline.serving.specification import extraction_server

_LATE_IMPORTS = ("pyarrow.parquet",)


def extract(lineage: Lineage, shards: tuple[str, ...], fingerprint: str | None) -> dict[str, float]:
    """Make the states of `shards`, all of which must be missing; returns what is printed."""
    opened: list[tuple[float, float]] = []
    spec = extraction_server(lineage, lineage.staging)
    if fingerprint not in (None, spec.fingerprint):
        raise SystemExit(
            f"the recipe wants the server {spec.fingerprint}, expected {fingerprint}: code of the connector "
            "or the environment changed while this was measured"
        )

    @contextmanager
    def server() -> Iterator[RunningServer]:
        with open_server(spec, lineage.logs) as running:
            opened.append((time.monotonic(), time.process_time()))
            yield running

    def on_shard(shard: str, manifest: Manifest) -> None:
        return None

    proofs = _time_proofs()
    made = extract_shards(lineage, shards, server(), on_shard)
    return {
        "seconds": time.monotonic() - opened[0][0],
        "work_cpu_s": time.process_time() - opened[0][1],
        "proof_seconds": sum(proofs),
        "samples": sum(one.facts["samples"] for one in made),
        "tokens": sum(one.facts["tokens"] for one in made),
        "quarantined": sum(sum(one.facts["quarantined"].values()) for one in made),
    }


def _time_proofs() -> list[float]:
    """Seconds of each proof from now on."""
    seconds: list[float] = []
    prove = run.prove

    async def timed(*arguments: Any) -> None:
        began = time.monotonic()
        await prove(*arguments)
        seconds.append(time.monotonic() - began)

    run.prove = timed
    return seconds


def main() -> None:
    """Extract as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("storage", type=Path)
    parser.add_argument("--first", type=int, help="number of shards, by default all")
    parser.add_argument("--server", help="fingerprint of the server that runs")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for name in _LATE_IMPORTS:  # else they would be in the seconds, and theirs are not
        importlib.import_module(name)
    lineage = Lineage(load_recipe(str(options.recipe), options.recipe.parent), options.storage)
    print(json.dumps(extract(lineage, lineage.recipe.shards[: options.first], options.server)))


if __name__ == "__main__":
    main()
