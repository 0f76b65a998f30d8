"""Extraction beside plain prefill of the same tokens and beside speculators' client, on the real vLLM.

    python -m benchmarks.extraction.throughput      half an hour on two cores that do nothing else

The samples are those of the demo (`--storage`, where `eagle3 run` left them). Three contestants take turns,
every other round in reverse order:

    extraction    the step hidden_state_shards, all checks included, to its last manifest
    prefill       the same requests (the same token ids, max_tokens 1, as many in flight) to a server with the
                  same flags, but without speculative config and connector
    speculators   `generate-offline-data --validate-outputs` against the server of `extraction`

Two servers are up at a time; `idle_server_cpu_s` shows that the one that is not asked takes none of the
cores. Both are started anew for every two rounds, and warmed up: of two processes of the very same server one
can be faster than the other by 3 %, as long as they live. Measured are

    tokens_per_second            tokens of all samples by the seconds of the work, without imports
    command                      the same by the seconds of the whole command, from its start to its end
    after_the_proof              tokens_per_second without the proof of a server, done once after its start
    cpu_ms_per_1000_tokens       of the client, from its first request to its end
    process_cpu_s                of the client's whole process with its imports: what this many samples cost

Each is the median of the rounds with the least and the most of them; a ratio is of two runs of one round.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.extraction.demo_set import add_options, own_lineage
from benchmarks.extraction.prefill import PlainServer
from benchmarks.extraction.theirs import generate, write_dataset
from benchmarks.generation.process import Usage, run
from benchmarks.generation.regenerate import spread
from benchmarks.generation.target import RECIPE
from benchmarks.record import record, warn_of_changes
from eagle3_pipeline.extraction.plan import planned_shard
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.audit import audit_samples
from eagle3_pipeline.serving.server import RunningServer, open_server
from eagle3_pipeline.serving.specification import extraction_server

CONTESTANTS = ("extraction", "prefill", "speculators")
Numbers = dict[str, float]
_MOST_QUARANTINED = 2


class Contest:
    """The contestants on one pair of servers; each run has a folder of its own below `folder`."""

    def __init__(
        self, folder: Path, lineage: Lineage, recipe: Path, server: RunningServer, plain: PlainServer
    ) -> None:
        self._folder = folder
        self._lineage = lineage
        self._recipe = recipe
        self._server = server
        self._plain = plain
        self._in_flight = lineage.recipe.extraction.concurrency
        self._runs = 0
        planned = [planned_shard(lineage, shard).samples for shard in lineage.recipe.shards]
        self._samples = [sample.token_ids for samples in planned for sample in samples]
        self._of_first_shard = len(planned[0])
        folder.mkdir()
        write_dataset(folder / "dataset", self._samples)

    def warm_up(self) -> None:
        """The first shard to each server; the one that captures is proven then, too."""
        self.extraction("--first", "1")
        self.prefill(self._of_first_shard)

    def extraction(self, *options: str) -> Numbers:
        """One run of the step. A sample that it quarantines was extracted twice, and counts as once."""
        shutil.rmtree(self._lineage.folder / "hidden_state_shards", ignore_errors=True)
        command = [sys.executable, "-m", "benchmarks.extraction.ours"]
        command += [str(self._recipe), str(self._lineage.storage_root)]
        command += ["--server", self._server.spec.fingerprint, *options]
        with self._watched("extraction") as (folder, server_cpu):
            usage = run(command, folder)
        found = json.loads(usage.output)
        if found["quarantined"] > _MOST_QUARANTINED:
            raise RuntimeError(
                f"{found['quarantined']} samples are quarantined, expected {_MOST_QUARANTINED} at most"
            )
        asked = found["samples"] + found["quarantined"]
        found["tokens"] = sum(map(len, self._samples[:asked]))
        return self._numbers(found, usage, server_cpu)

    def prefill(self, first: int | None = None) -> Numbers:
        """One run of the plain client, over the `first` samples or all."""
        ids = self._folder / "ids.json"
        ids.write_text(json.dumps(self._samples[:first]))
        command = [sys.executable, "-m", "benchmarks.extraction.prefill", str(ids)]
        command += ["--base-url", self._plain.base_url, "--model", self._plain.model]
        command += ["--in-flight", str(self._in_flight)]
        with self._watched("prefill") as (folder, server_cpu):
            usage = run(command, folder)
        return self._numbers(json.loads(usage.output), usage, server_cpu)

    def speculators(self) -> Numbers:
        """One run of speculators' client."""
        with self._watched("speculators") as (folder, server_cpu):
            usage, found = generate(
                folder / "run",
                self._folder / "dataset",
                self._server.base_url,
                self._lineage.staging,
                self._in_flight,
                len(self._samples),
            )
        found["tokens"] = sum(map(len, self._samples))
        return self._numbers(found, usage, server_cpu)

    @contextmanager
    def _watched(self, who: str) -> Iterator[tuple[Path, Numbers]]:
        """A folder for one run, removed behind it, and the CPU that both servers take meanwhile."""
        self._runs += 1
        folder = self._folder / f"{self._runs}-{who}"
        folder.mkdir()
        pids = {"busy": self._server.pid, "idle": self._plain.pid}
        if who == "prefill":
            pids = {"busy": self._plain.pid, "idle": self._server.pid}
        before = {name: cpu_of_tree(pid) for name, pid in pids.items()}
        used: Numbers = {}
        yield folder, used
        used |= {
            f"{name}_server_cpu_s": round(cpu_of_tree(pid) - before[name], 2) for name, pid in pids.items()
        }
        shutil.rmtree(folder)

    @staticmethod
    def _numbers(found: Numbers, usage: Usage, server_cpu: Numbers) -> Numbers:
        return {
            **found,
            "seconds": round(found["seconds"], 2),
            "tokens_per_second": round(found["tokens"] / found["seconds"], 1),
            "proof_seconds": round(found.get("proof_seconds", 0.0), 2),
            "work_cpu_s": round(found["work_cpu_s"], 3),
            "process_cpu_s": round(usage.cpu_s, 3),
            "process_seconds": round(usage.seconds, 2),
            "peak_mib": round(usage.peak_bytes / 2**20, 1),
            **server_cpu,
        }


def cpu_of_tree(pid: int) -> float:
    """CPU seconds of a process and of its living children, user and system."""
    server = psutil.Process(pid)
    times = [one.cpu_times() for one in (server, *server.children(recursive=True))]
    return sum(one.user + one.system for one in times)


@contextmanager
def open_contest(folder: Path, lineage: Lineage, recipe: Path) -> Iterator[Contest]:
    """Both servers, and their contestants."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        open_server(extraction_server(lineage, lineage.staging), lineage.logs, stop=True) as server,
        PlainServer(lineage, Path(name) / "plain.log").run() as plain,
    ):
        yield Contest(Path(name) / "runs", lineage, recipe, server, plain)


def hold(contests: Callable[[], AbstractContextManager[Any]], rounds: int) -> dict[str, Any]:
    """The rounds, every two of them on servers of their own; returns what main records, with all runs."""
    runs: dict[str, list[Numbers]] = {who: [] for who in CONTESTANTS}
    for first in range(0, rounds, 2):
        with contests() as contest:
            contest.warm_up()
            for number in range(first, min(first + 2, rounds)):
                for who in CONTESTANTS if number % 2 == 0 else reversed(CONTESTANTS):
                    runs[who].append(getattr(contest, who)())
                    print(f"round {number + 1}, {who}: {json.dumps(runs[who][-1])}", flush=True)
    return summary(runs)


def summary(runs: dict[str, list[Numbers]]) -> dict[str, Any]:
    """Medians with their spread, and ratios of extraction to the others, round by round."""
    values: dict[str, Callable[[Numbers], float]] = {
        "tokens_per_second": lambda run: run["tokens"] / run["seconds"],
        "command": lambda run: run["tokens"] / run["process_seconds"],
        "after_the_proof": lambda run: run["tokens"] / (run["seconds"] - run["proof_seconds"]),
        "cpu_ms_per_1000_tokens": lambda run: 1e6 * run["work_cpu_s"] / run["tokens"],
        "process_cpu_s": lambda run: run["process_cpu_s"],
    }
    numbers: dict[str, Any] = {}
    for name, value in values.items():
        by_round = {who: list(map(value, runs[who])) for who in CONTESTANTS}
        numbers[name] = {who: spread(by_round[who]) for who in CONTESTANTS}
        for other in CONTESTANTS[1:]:
            ratios = (a / b for a, b in zip(by_round["extraction"], by_round[other], strict=True))
            numbers[name][f"extraction_to_{other}"] = spread(ratios)
    return {**numbers, "runs": runs}


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=6, help="even, so that all begin equally often")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    warn_of_changes()
    with tempfile.TemporaryDirectory(prefix="extraction-") as name:
        folder = Path(name)
        lineage, recipe = own_lineage(options.recipe, options.storage, folder / "own", {})
        audit_samples(lineage)
        numbers = hold(partial(open_contest, folder, lineage, recipe), options.rounds)
    shown = {key: value for key, value in numbers.items() if key != "runs"}
    print(json.dumps(shown, indent=2))
    if options.recipe == RECIPE:
        settings = {"rounds": options.rounds, "in_flight": lineage.recipe.extraction.concurrency}
        print(f"written: {record('extraction', {**settings, **numbers})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
