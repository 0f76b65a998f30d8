"""Tokens a second of this project's training and of a plain loop over speculators' parts, on the same states.

    python -m benchmarks.training.throughput      half an hour on two cores that do nothing else

The states are those of the demo (`--storage`, where `eagle3 run` left them). Two contestants take turns,
every other round in reverse order, each in a process of its own that trains one epoch:

    ours     the training process of the step draft_checkpoint, from shards
    plain    benchmarks/training/plain.py: speculators' model, loss, collation and file-per-sample data

Both train the same parameters with the same settings: tokens per step, test-time steps, draft vocabulary,
loss, trained head, AdamW, bf16 autocast. Tokens are rows that are trained on or give context, not padding.
The first steps of each run warm up. A ratio is of two runs of one round.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.extraction.demo_set import STATES, add_options, own_lineage
from benchmarks.generation.process import run
from benchmarks.generation.regenerate import spread
from benchmarks.generation.target import RECIPE
from benchmarks.record import record, warn_of_changes
from benchmarks.training import ours
from benchmarks.training.their_data import write_their_data
from benchmarks.training.workload import for_timing, plan_of, quiet_environment
from eagle3_pipeline.training.plan import TrainingPlan

CONTESTANTS = ("ours", "plain")
Numbers = dict[str, float]


class Contestants(Protocol):
    """Who takes part; each call is one run."""

    def ours(self) -> Numbers: ...

    def plain(self) -> Numbers: ...


class Contest:
    """The two loops on the states of one plan; each run has a folder of its own below `folder`."""

    def __init__(self, folder: Path, plan: TrainingPlan, workers: int) -> None:
        self._folder = folder
        self._plan = plan
        self._workers = workers
        self._data = write_their_data(folder / "data", plan)
        self._runs = 0
        self._steps = 0

    def ours(self) -> Numbers:
        """One epoch of the training process; the other one then takes as many steps."""
        folder = self._next("ours")
        found = ours.train(for_timing(self._plan, folder))
        self._steps = int(found["steps"])
        shutil.rmtree(folder)
        return found

    def plain(self) -> Numbers:
        """The plain loop."""
        folder = self._next("plain")
        folder.mkdir()
        plan = folder / "plan.json"
        for_timing(self._plan, folder).write(plan)
        command = [sys.executable, "-m", "benchmarks.training.plain", str(plan), str(self._data)]
        command += ["--steps", str(self._steps), "--workers", str(self._workers)]
        found: Numbers = json.loads(run(command, folder, quiet_environment(())).output.splitlines()[-1])
        shutil.rmtree(folder)
        return found

    def _next(self, who: str) -> Path:
        self._runs += 1
        return self._folder / f"{self._runs}-{who}"


def hold(contest: Contestants, rounds: int) -> dict[str, Any]:
    """A round that warms up, then those that count; returns what main records, with all runs."""
    for who in CONTESTANTS:
        getattr(contest, who)()
    runs: dict[str, list[Numbers]] = {who: [] for who in CONTESTANTS}
    for number in range(rounds):
        for who in CONTESTANTS if number % 2 == 0 else reversed(CONTESTANTS):
            runs[who].append(getattr(contest, who)())
            print(f"round {number + 1}, {who}: {json.dumps(runs[who][-1])}", flush=True)
    return {"tokens_per_second": compare(runs["ours"], runs["plain"]), "runs": runs}


def compare(mine: list[Numbers], theirs: list[Numbers]) -> dict[str, Numbers]:
    """Tokens a second of both, and how many times as fast ours is, round by round."""
    rates = [[one["tokens_per_second"] for one in runs] for runs in (mine, theirs)]
    ratios = (one / other for one, other in zip(*rates, strict=True))
    return {"ours": spread(rates[0]), "theirs": spread(rates[1]), "ratio": spread(ratios)}


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=6, help="even, so that both begin equally often")
    parser.add_argument("--shards", type=int, help="the first so many, for a trial")
    parser.add_argument("--workers", type=int, default=1, help="processes that read for the plain loop")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    warn_of_changes()
    with tempfile.TemporaryDirectory(prefix="training-") as name:
        folder = Path(name)
        plan = plan_of(own_lineage(options.recipe, options.storage, folder / "own", {}, STATES)[0])
        plan = replace(plan, shards=plan.shards[: options.shards])
        numbers = hold(Contest(folder, plan, options.workers), options.rounds)
    settings = {
        name: getattr(plan, name) for name in ("tokens_per_step", "test_time_steps", "loss", "train_head")
    }
    numbers = {"rounds": options.rounds, "workers": options.workers, **settings, **numbers}
    print(json.dumps({key: value for key, value in numbers.items() if key != "runs"}, indent=2))
    if options.recipe == RECIPE and options.shards is None:
        print(f"written: {record('training-throughput', numbers)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
