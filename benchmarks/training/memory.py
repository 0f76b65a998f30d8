"""Peak memory of the training process beside what training/memory.py computes before it starts.

    python -m benchmarks.training.memory      20 minutes, 13 GB of memory, 4 GB below --folder

States are random (invented.py). Counted is what a process gains over its imports in anonymous memory: pages
of mapped files (states, the target's embedding) are the disk's cache, which goes when somebody wants the
memory, so that the computed number is taken without the embedding. Each case is a process of its own:

    peak          from the start to the draft
    by_event      the most until each kind of event: `start` ends the building, `step` a step, `epoch` the
                  validation, and `done` checkpoint and export
    computed      lasting things, and the larger of gradients and activations of the largest batch
"""

import argparse
import json
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.generation.process import run
from benchmarks.record import record, warn_of_changes
from benchmarks.training.invented import SHAPES, make_plan
from benchmarks.training.workload import for_timing, quiet_environment
from eagle3_pipeline.recipe.training import Training
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.training.batches import supervised_rows
from eagle3_pipeline.training.plan import TrainingPlan

_SAMPLE_S = 0.005
_STEPS = 4
Numbers = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A training to measure."""

    shape: str
    training: Training
    sample_tokens: int = 257


CASES = {
    "smollm2": Case("smollm2", Training(tokens_per_step=2048)),
    "smollm2, 8192 tokens a step": Case("smollm2", Training(tokens_per_step=8192)),
    "smollm2, 8192 tokens in 4 batches": Case("smollm2", Training(tokens_per_step=8192, accumulation=4)),
    "smollm2, muon and cross entropy": Case("smollm2", Training(optimizer="muon", loss="ce")),
    "llama-8b": Case("llama-8b", Training(tokens_per_step=1024, learning_rate=1e-4)),
}


def measure(case: Case, folder: Path) -> Numbers:
    """Train one epoch of a few steps in a process of its own; MiB of both numbers and their ratio."""
    parts = case.training.accumulation
    batch = case.training.tokens_per_step // parts // (case.sample_tokens - 1)
    samples = _STEPS * parts * batch + 1
    plan = make_plan(folder, SHAPES[case.shape], case.training, samples=samples, tokens=case.sample_tokens)
    path = folder / "plan.json"
    for_timing(plan, folder / "training").write(path)
    command = [sys.executable, "-m", "benchmarks.training.memory", "--plan", str(path)]
    found: Numbers = json.loads(run(command, folder, quiet_environment(())).output.splitlines()[-1])
    found["ratio"] = round(found["peak"] / found["computed"], 3)
    return found


def watch_training(plan: TrainingPlan) -> dict[str, Any]:
    """Train in this process, and compute afterwards; MiB."""
    from eagle3_pipeline.training import process

    watch = Watch()
    emit = process.emit

    def note(kind: str, **values: Any) -> None:
        watch.note(kind)
        emit(kind, **values)

    with watch.watching(), mock.patch.object(process, "emit", note):
        process.run_plan(plan)
    parts, embedding = _compute(plan)
    return {
        "peak": _mib(max(watch.by_event.values())),
        "computed": _mib(parts.pop("total") - embedding),
        "by_event": {kind: _mib(size) for kind, size in watch.by_event.items()},
        "parts": {name: _mib(size) for name, size in parts.items()},
    }


def _mib(size: int) -> float:
    return round(size / 2**20, 1)


def _compute(plan: TrainingPlan) -> tuple[dict[str, int], int]:
    """What training/memory.py says of the largest batch, by part, and the embedding's share of it; bytes."""
    from eagle3_pipeline.training.memory import expected_bytes
    from eagle3_pipeline.training.process import build_model

    reader = ShardReader([Path(shard) for shard in plan.shards])
    mask = reader.loss_mask(0)
    batch = plan.tokens_per_step // plan.accumulation // (len(mask) - 1)
    model = build_model(plan)
    found = expected_bytes(
        model,
        rows=batch * (len(mask) - 1),
        supervised=batch * len(supervised_rows(mask)),
        steps=plan.test_time_steps,
        loss=plan.loss,
        optimizer=plan.optimizer,
        accumulation=plan.accumulation,
        longest=len(mask) - 1,
    )
    embedding = model.embed_tokens.weight
    parts = {name: size for name, size in asdict(found).items() if name != "gradients_stay"}
    return {**parts, "total": found.total}, embedding.numel() * embedding.element_size()


class Watch:
    """The most anonymous memory beyond that at the start, in the times between events."""

    def __init__(self) -> None:
        self._before = anonymous_bytes()
        self._most = 0
        self.by_event: dict[str, int] = {}
        """The most bytes in the times that ended with an event of each kind."""

    def saw(self, size: int) -> None:
        """Bytes of the process at one moment."""
        self._most = max(self._most, size - self._before)

    def note(self, kind: str) -> None:
        """An event ends a time; the next one begins with what is there."""
        self.by_event[kind] = max(self.by_event.get(kind, 0), self._most)
        self._most = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look a few hundred times a second."""
        done = threading.Event()

        def look() -> None:
            while not done.wait(_SAMPLE_S):
                self.saw(anonymous_bytes())

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def anonymous_bytes() -> int:
    """Resident memory of this process that belongs to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--folder", type=Path, help="where states are written for the time of the run")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.plan:
        print(json.dumps(watch_training(TrainingPlan.read(options.plan))))
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    warn_of_changes()
    found: dict[str, Numbers] = {}
    for name in options.cases:
        with tempfile.TemporaryDirectory(prefix="memory-", dir=options.folder) as folder:
            found[name] = measure(CASES[name], Path(folder))
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    if options.cases == list(CASES):
        print(f"written: {record('training-memory', {'mib': found})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
