"""Peak memory of the extraction and of the reader, for n and for 4n samples of the same kind, on a stand-in.

    python -m benchmarks.extraction.memory      10 minutes, and 6 GB of the disk for temporary files

Samples have 100 to 400 tokens, 250 of them make a shard, a part has 16 MiB at most and 32 MiB may be on
their way, so that even n samples fill each buffer many times, and the heap is as fragmented as it gets.
Counted is what a process has to itself: resident, less the pages of files that it has mapped (those are the
disk's cache, which goes when somebody wants the memory). Each number is the median of three runs; `ratio` is
that of 4n samples to n.
"""

import argparse
import json
import logging
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation.process import run
from benchmarks.record import record, warn_of_changes
from eagle3_pipeline.extraction.head import Head
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.samples import Sample
from eagle3_pipeline.serving.server import open_server
from eagle3_pipeline.serving.specification import extraction_server
from eagle3_pipeline.target import make_target
from tests.extraction.build import audit, invent, make_samples
from tests.fakes.heads import head_of
from tests.models import make_llama
from tests.recipes import finish_prompts, tiny_recipe

_PER_SHARD = 250
_VOCABULARY = range(20, 500)  # past the special tokens
_HIDDEN = 128


def make_world(folder: Path, samples: int) -> tuple[Lineage, Path]:
    """A recipe for the stand-in, its `samples` samples made and audited, and the path of its file."""
    os.environ.setdefault("FAKE_PYTHON", sys.executable)
    model = make_llama(folder / "model", hidden=_HIDDEN)
    path = tiny_recipe(
        folder,
        model,
        fake=True,
        prompts={"count": samples, "per_shard": _PER_SHARD},
        extraction={"concurrency": 32, "part_gib": 1 / 64, "staging_gib": 1 / 32},
        server={"common": {"max_num_seqs": 64}},
    )
    lineage = Lineage(load_recipe(str(path), folder), folder / "storage")
    make_target(lineage)
    finish_prompts(lineage)
    chance, tokens = random.Random(0), _said_for_sure(model)
    for number, shard in enumerate(lineage.recipe.shards):
        samples = [_invent(number, index, chance, tokens) for index in range(_PER_SHARD)]
        make_samples(lineage, shard, samples)
    return audit(lineage), path


def _said_for_sure(model: Path) -> list[int]:
    """Tokens that the stand-in's states do say: of the others the checks would find none."""
    spoken = head_of(model)
    assert spoken is not None
    states = torch.tensor(spoken.states_before(_VOCABULARY))
    likeliest = Head.read(model).outlook(states, temperature=1.0, top_p=1.0, top_k=-1).likeliest
    return [token for token, said in zip(_VOCABULARY, likeliest.tolist(), strict=True) if said == token]


def _invent(shard: int, index: int, chance: random.Random, tokens: list[int]) -> Sample:
    length = chance.randint(100, 400) // 2
    names = ("prompt_token_ids", "completion_token_ids")
    ids = {name: chance.choices(tokens, k=length) for name in names}
    return invent(shard, index, sample_id=f"{shard}-{index}-t0", **ids)


def measure(lineage: Lineage, recipe: Path, folder: Path, shards: int) -> dict[str, float]:
    """MiB of both processes for the first `shards` shards, which are extracted anew."""
    shutil.rmtree(lineage.folder / "hidden_state_shards", ignore_errors=True)
    folder.mkdir()
    found: dict[str, float] = {"samples": shards * _PER_SHARD}
    for name in ("ours", "reading"):
        command = [sys.executable, "-m", f"benchmarks.extraction.{name}", str(recipe)]
        command += [str(lineage.storage_root), "--first", str(shards)]
        usage = run(command, folder)
        said = json.loads(usage.output)
        if said["samples"] != found["samples"]:
            raise RuntimeError(f"{said} of {found['samples']} samples")
        found[name] = round(usage.peak_private_bytes / 2**20, 1)
        found[f"{name}_seconds"] = round(said["seconds"], 2)
    print(json.dumps(found), flush=True)
    return found


def summary(few: list[dict[str, float]], many: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of both sizes and their ratio, for the extraction (`ours`) and the reader (`reading`)."""
    numbers: dict[str, Any] = {"samples": few[0]["samples"], "many_samples": many[0]["samples"]}
    for name, title in (("ours", "extraction"), ("reading", "reader")):
        peaks = [statistics.median(one[name] for one in runs) for runs in (few, many)]
        ratio = round(peaks[1] / peaks[0], 3)
        numbers[title] = {"mib": peaks[0], "mib_of_many": peaks[1], "ratio": ratio}
    return {**numbers, "runs": [*few, *many]}


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=24, help="n in shards of 250; fewer for a trial")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    warn_of_changes()
    with tempfile.TemporaryDirectory(prefix="memory-") as name:
        folder = Path(name)
        lineage, recipe = make_world(folder, 4 * options.shards * _PER_SHARD)
        runs: dict[int, list[dict[str, float]]] = {options.shards: [], 4 * options.shards: []}
        with open_server(extraction_server(lineage, lineage.staging), lineage.logs, stop=True):
            for number in range(options.rounds):
                for shards, into in runs.items():
                    into.append(measure(lineage, recipe, folder / f"{number}-{shards}", shards))
    numbers = summary(*runs.values())
    print(json.dumps({key: value for key, value in numbers.items() if key != "runs"}, indent=2))
    if options.shards == parser.get_default("shards"):
        print(f"written: {record('extraction-memory', numbers)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
