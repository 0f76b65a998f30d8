"""Reading for training: random samples from shards, beside one file per sample and a sequential read.

    python -m benchmarks.shards.reading                 a few minutes, 3 GB below --folder; writes the result
    python -m benchmarks.shards.reading --samples 40    a trial, printed

Each way delivers the same samples as tensors, and every byte of the states is used once (summed up as
integers), which is what a copy to an accelerator does. In each round all ways take their turn:

    bf16-all ...    ShardReader, samples in a random order; one way for each form of a shard
    files           safetensors' load_file of one file per sample, in the same order
    speculators     speculators' ArrowDataset, which reads such files, in the same order
    sequential      the parts of bf16-all from the first to the last byte through a buffer of 1 MiB

`warm`: everything is in the page cache, and the reader has been used before, as from the second epoch on.
`cold`: the pages are dropped before each turn, and everything is opened anew. Ratios are of one round; each
is the median with the least and the most.

`memory_mib`: the most anonymous memory that a process gains over its imports while it reads n and 4n samples.
The pages of a mapped file are page cache: the kernel takes them back when it wants to.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.record import record, warn_of_changes
from benchmarks.shards.sets import FORMS, write_files, write_shard
from eagle3_pipeline.shards.reader import ShardReader

_CHUNK_BYTES = 1 << 20
_BATCH = 8  # samples of 250 tokens in a training step of 2,048
Way = Callable[[], None]


class Contest:
    """All ways over the same samples below `folder`."""

    def __init__(self, folder: Path, samples: int) -> None:
        self._shards = {form: write_shard(folder, form, samples) for form in FORMS}
        self._files = write_files(folder / "files", samples)
        os.sync()  # pages that are not on the disk yet cannot be dropped
        self._order = list(range(samples))
        random.Random(1).shuffle(self._order)
        self.tokens = sum(ShardReader([self._shards["bf16-all"]]).lengths)

    def ways(self) -> dict[str, Way]:
        """Each way, with a reader of its own."""
        readers = {form: ShardReader([folder]) for form, folder in self._shards.items()}
        shards = {form: lambda reader=reader: self._read(reader) for form, reader in readers.items()}
        theirs = _speculators(self._files)
        return {
            **shards,
            "files": self._read_files,
            "speculators": lambda: self._use(theirs[index] for index in self._order),
            "sequential": self._read_sequentially,
        }

    def drop(self) -> None:
        """Take all files out of the page cache; what is mapped would stay."""
        for path in [*self._files.rglob("*"), *(p for s in self._shards.values() for p in s.iterdir())]:
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _read(self, reader: ShardReader) -> None:
        self._use(self._batches(reader))

    def _batches(self, reader: ShardReader) -> Iterator[Mapping[str, torch.Tensor]]:
        """As training reads: what comes next is fetched from the disk meanwhile."""
        reader.prefetch(self._order[:_BATCH])
        for start in range(0, len(self._order), _BATCH):
            reader.prefetch(self._order[start + _BATCH : start + 2 * _BATCH])
            yield from (reader[index] for index in self._order[start : start + _BATCH])

    def _read_files(self) -> None:
        from safetensors.torch import load_file

        names = (f"hs_{index}.safetensors" for index in self._order)
        self._use(load_file(self._files / "hidden_states" / name) for name in names)

    def _read_sequentially(self) -> None:
        buffer = bytearray(_CHUNK_BYTES)
        values = torch.frombuffer(buffer, dtype=torch.int64)
        for part in sorted(self._shards["bf16-all"].glob("part-*")):
            with part.open("rb", buffering=0) as file:
                while read := file.readinto(buffer):
                    values[: read // 8].sum()

    @staticmethod
    def _use(samples: Iterable[Mapping[str, torch.Tensor]]) -> None:
        for sample in samples:
            for tensor in sample.values():
                if tensor.dtype == torch.bfloat16:
                    tensor.view(torch.int64).sum()


def _speculators(folder: Path) -> "Mapping[int, Mapping[str, torch.Tensor]]":
    from speculators.train.data import ArrowDataset

    return ArrowDataset(max_len=1 << 20, datapath=folder, on_missing="raise")  # type: ignore[return-value]


def warm(contest: Contest, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    ways = contest.ways()
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in _turns(ways, number):
            seconds[name].append(_timed(ways[name]))
    return seconds


def cold(contest: Contest, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, opening included."""
    seconds: dict[str, list[float]] = {name: [] for name in contest.ways()}
    for number in range(rounds):
        for name in _turns(seconds, number):
            contest.drop()
            seconds[name].append(_timed(contest.ways()[name]))
    return seconds


def _turns(names: Iterable[str], number: int) -> list[str]:
    """Who begins changes from round to round."""
    listed = list(names)
    first = number % len(listed)
    return listed[first:] + listed[:first]


def _timed(way: Way) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def compare(seconds: dict[str, list[float]], tokens: int) -> dict[str, object]:
    """Tokens a second of each way, and how many times as fast bf16 shards are as each other way."""
    ours = seconds["bf16-all"]
    return {
        "tokens_per_second": {name: _spread([tokens / one for one in of]) for name, of in seconds.items()},
        "times_as_fast": {
            name: _spread([theirs / mine for mine, theirs in zip(ours, of, strict=True)])
            for name, of in seconds.items()
            if of is not ours
        },
    }


def _spread(values: list[float]) -> dict[str, float]:
    numbers = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: float(f"{value:.4g}") for name, value in numbers.items()}


def memory(folder: Path, samples: int) -> dict[str, float]:
    """MiB that a reading process gains, by the number of samples."""
    gained = {}
    for count in (samples, 4 * samples):
        shard = write_shard(folder / f"memory-{count}", "bf16-all", count)
        command = [sys.executable, "-m", "benchmarks.shards.reading", "--measure-memory", str(shard)]
        gained[str(count)] = float(subprocess.run(command, check=True, capture_output=True).stdout)
    return gained


def measure_memory(shard: Path) -> float:
    """Read all samples of a shard in this process: MiB of anonymous memory at the most, over the start."""
    torch.zeros(1 << 20, dtype=torch.int64).sum()  # torch's own start
    before, most, done = _anonymous_kib(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, _anonymous_kib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    reader = ShardReader([shard])
    order = list(range(len(reader)))
    random.Random(1).shuffle(order)
    Contest._use(reader[index] for index in order)
    done.set()
    watcher.join()
    return (max(most, _anonymous_kib()) - before) / 1024


def _anonymous_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    """Measure, print, and record unless it is a trial."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, help="a trial with so many")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the samples are written for the time of the run")
    parser.add_argument("--measure-memory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure_memory:
        print(measure_memory(options.measure_memory))
        return
    warn_of_changes()
    samples = options.samples or 600
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        contest = Contest(folder, samples)
        numbers = {
            "samples": samples,
            "tokens": contest.tokens,
            "rounds": options.rounds,
            "warm": compare(warm(contest, options.rounds), contest.tokens),
            "cold": compare(cold(contest, options.rounds), contest.tokens),
            "memory_mib": memory(folder, samples // 2),
        }
    print(numbers if options.samples else record("shards", numbers))


if __name__ == "__main__":
    main()
