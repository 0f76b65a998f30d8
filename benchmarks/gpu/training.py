"""Training beside `speculators train` on one GPU: tokens a second and MFU. Has to be run where a GPU is:

    python -m benchmarks.gpu.training --gpu 0 --shape llama-8b      20 minutes, 45 GB below --folder

States are random and lengths all the same (benchmarks/training/invented.py): speed depends on nothing
else. Two contestants take turns on the same samples, every other round in reverse order:

    ours           the training process of the step draft_checkpoint, from shards
    speculators    `speculators train`, from its table and file-per-sample data

with the same settings: tokens per step, test-time steps, loss, norms, full attention, AdamW, cosine. The head
is frozen in both, since theirs cannot train it; `ours_with_head` is ours as recipes have it. The first steps,
with all compilation, warm up. Before anything is measured, attention on the GPU is held against that of the
CPU. Operations are counted by benchmarks/training/flops.py, the same for both.
Writes benchmarks/results/gpu-training.json. Without a GPU it says so and exits with 2.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.generation.process import run
from benchmarks.generation.regenerate import spread
from benchmarks.record import record, warn_of_changes
from benchmarks.training import ours
from benchmarks.training.flops import count_rows, flops, peak_of, utilization
from benchmarks.training.invented import SHAPES, Shape, make_plan
from benchmarks.training.their_data import write_their_data
from benchmarks.training.theirs import command, same_settings, workload_options
from benchmarks.training.workload import for_timing, quiet_environment
from eagle3_pipeline.recipe.training import Training
from eagle3_pipeline.serving import nvml
from eagle3_pipeline.serving.gpu_memory import read_memory
from eagle3_pipeline.serving.gpus import physical_gpus
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.training.plan import TrainingPlan

CONTESTANTS = ("ours", "speculators", "ours_with_head")
Numbers = dict[str, float]


@dataclass(frozen=True)
class Work:
    """Operations per token of what is trained, without and with the head, and what the GPU could do."""

    frozen_head: float
    with_head: float
    peak: float

    @classmethod
    def of(cls, plan: TrainingPlan, shape: Shape, peak: float) -> "Work":
        reader = ShardReader([Path(shard) for shard in plan.shards])
        rows = count_rows(reader.loss_mask(index) for index in range(len(reader)))
        counts = (
            flops(shape, rows, steps=plan.test_time_steps, train_head=train_head) / rows.rows
            for train_head in (False, True)
        )
        return cls(*counts, peak)

    def share(self, who: str, tokens_per_second: float) -> float:
        """MFU of a contestant."""
        per_token = self.with_head if who == "ours_with_head" else self.frozen_head
        return utilization(tokens_per_second, per_token, self.peak)


class Contest:
    """The contestants on one plan; each run has a folder of its own below `folder`."""

    def __init__(self, folder: Path, plan: TrainingPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._data = write_their_data(folder / "data", plan)
        self._runs = 0
        self._steps = 0

    def ours(self, train_head: bool = False) -> Numbers:
        """One epoch of the training process; the other one then takes as many steps."""
        folder = self._next()
        found = ours.train(for_timing(self._plan, folder, train_head=train_head))
        self._steps = int(found["steps"])
        shutil.rmtree(folder)
        return found

    def ours_with_head(self) -> Numbers:
        """The same with a trained head."""
        return self.ours(train_head=True)

    def speculators(self) -> Numbers:
        """Its own command."""
        folder = self._next()
        folder.mkdir()
        numbers = folder / "numbers.json"
        options = their_options(self._plan, self._data, folder, self._steps)
        run(command(numbers, options), folder, quiet_environment(self._plan.devices))
        found: Numbers = json.loads(numbers.read_text())
        shutil.rmtree(folder)
        return found

    def _next(self) -> Path:
        self._runs += 1
        return self._folder / f"run-{self._runs}"


def their_options(plan: TrainingPlan, data: Path, folder: Path, steps: int) -> list[str]:
    """Options of its command. It waits for the GPU at each step that it logs: so it logs few."""
    return [*workload_options(plan, data, folder, steps), *same_settings(plan), "--log-freq", "100"]


def check_attention(folder: Path, gpu: str) -> None:
    """Raise RuntimeError where the attention of this GPU is not that of the CPU: nothing is measured then.

    In a process of its own, which leaves no memory taken.
    """
    found = run([sys.executable, "-m", "benchmarks.gpu.attention"], folder, quiet_environment((gpu,)))
    print(found.output.splitlines()[-1], flush=True)


def hold(contest: Any, work: Work, rounds: int) -> dict[str, Any]:
    """One round that warms up, then those that count; returns what main records, with all runs."""
    for who in CONTESTANTS:
        getattr(contest, who)()
    runs: dict[str, list[Numbers]] = {who: [] for who in CONTESTANTS}
    for number in range(rounds):
        for who in CONTESTANTS if number % 2 == 0 else reversed(CONTESTANTS):
            runs[who].append(getattr(contest, who)())
            print(f"round {number + 1}, {who}: {json.dumps(runs[who][-1])}", flush=True)
    rates = {who: [one["tokens_per_second"] for one in of] for who, of in runs.items()}
    pairs = zip(rates["ours"], rates["speculators"], strict=True)
    return {
        "tokens_per_second": {who: spread(of) for who, of in rates.items()},
        "ours_to_speculators": spread(mine / theirs for mine, theirs in pairs),
        "mfu_percent": {who: spread(100 * work.share(who, rate) for rate in of) for who, of in rates.items()},
        "gflop_per_token": {
            "frozen_head": round(work.frozen_head / 1e9, 3),
            "with_head": round(work.with_head / 1e9, 3),
        },
        "runs": runs,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="0", help="as in a recipe's partitions: 0, a UUID")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--sample-tokens", type=int, default=1000)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=4, help="even, so that both begin equally often")
    parser.add_argument(
        "--peak-tflops", type=float, help="dense bf16, where the GPU is not listed in flops.py"
    )
    parser.add_argument("--folder", type=Path, help="where states are written for the time of the run")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    options = parse(arguments)
    driver = nvml.nvml()
    if driver is None or not driver.gpus():
        print("no GPU here: NVML shows none. Run this on a machine with a GPU.", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warn_of_changes()
    (gpu,) = read_memory(physical_gpus((options.gpu,)))
    peak = options.peak_tflops * 1e12 if options.peak_tflops else peak_of(gpu.name)
    if peak is None:
        print(f"the peak of a {gpu.name} is not known: give --peak-tflops", file=sys.stderr)
        return 2
    shape = SHAPES[options.shape]
    # There is nothing to learn from noise: a lower rate keeps the loss a number.
    training = Training(tokens_per_step=options.tokens_per_step, learning_rate=1e-4)
    with tempfile.TemporaryDirectory(prefix="training-", dir=options.folder) as name:
        check_attention(Path(name), options.gpu)
        plan = make_plan(
            Path(name),
            shape,
            training,
            samples=options.samples,
            tokens=options.sample_tokens,
            devices=(options.gpu,),
        )
        numbers = hold(Contest(Path(name), plan), Work.of(plan, shape, peak), options.rounds)
    settings = {"gpu": gpu.name, "peak_tflops": peak / 1e12, "shape": asdict(shape), **_shown(options)}
    print(f"written: {record('gpu-training', {**settings, **numbers})}")
    return 0


def _shown(options: argparse.Namespace) -> dict[str, Any]:
    return {
        name: getattr(options, name) for name in ("samples", "sample_tokens", "tokens_per_step", "rounds")
    }


if __name__ == "__main__":
    sys.exit(main())
