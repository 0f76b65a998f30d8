"""One phase of the evaluation: all that is asked of one server, from its start to its stop.

    each cell of the phase | as often as it is measured | each set        kept one by one, see kept.py
    a further question                                                    kept as well

No server is started where all of it is kept.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle3_pipeline.evaluation.grid import Cell, Times
from eagle3_pipeline.evaluation.kept import Kept, Key
from eagle3_pipeline.evaluation.measurement import Measurement, measure
from eagle3_pipeline.evaluation.progress import Progress
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.serving.specification import ServerSpec, evaluation_server

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

Sets = Mapping[str, Sequence[Prompt]]
"""The prompts of each set by its name."""
Measured = dict[Cell, list[dict[str, Measurement]]]
"""What one phase gave: of each cell its repeats, of each repeat the measurement of every set."""


class ServerOpener(Protocol):
    """Gives the server to measure: the target alone, or with the draft in a folder. It stops when left."""

    def __call__(
        self, draft: Path | None, speculative_tokens: int | None = None, /
    ) -> "AbstractContextManager[RunningServer]":
        """The draft proposes `evaluation.speculative_tokens` at a time where it is not said how many."""


@dataclass(frozen=True)
class Bench:
    """What all phases of one report have in common."""

    lineage: Lineage
    server_with: ServerOpener
    sets: Sets
    kept: Kept
    progress: Progress


@dataclass(frozen=True)
class Phase:
    """A server, and what it is measured with."""

    words: str
    """Such as `with the draft`."""
    draft: Path | None
    speculative_tokens: int
    times: Times

    def server(self, lineage: Lineage) -> ServerSpec:
        """The server; raises what `evaluation_server` raises."""
        return evaluation_server(lineage, self.draft, self.speculative_tokens)

    def tasks(self, sets: Sets) -> "list[Task]":
        """All measurements, in their order."""
        return [
            Task(cell, repeat, name)
            for cell, times in self.times.items()
            for repeat in range(times)
            for name in sets
        ]


@dataclass(frozen=True)
class Task:
    """One set, measured once."""

    cell: Cell
    repeat: int
    name: str

    @property
    def key(self) -> Key:
        """What it is kept under, beside its server and machine; the server knows the speculative tokens."""
        return {
            "set": self.name,
            "temperature": self.cell.temperature,
            "in_flight": self.cell.in_flight,
            "repeat": self.repeat,
        }


@dataclass(frozen=True)
class Further:
    """What a server is asked when all is measured; `name` says of what, for it to be kept."""

    name: str
    words: str
    ask: Callable[["RunningServer", Measured], dict[str, Any]]
    """The answer as JSON values."""


def measure_phase(
    bench: Bench, phase: Phase, further: Further | None = None
) -> tuple[Measured, dict[str, Any]]:
    """All measurements of a phase, and the answer to `further` (nothing where it is None).

    Raises what `measure` and the question raise.
    """
    here = {"host": socket.gethostname(), "server": phase.server(bench.lineage).fingerprint}
    tasks = phase.tasks(bench.sets)
    found = {task: bench.kept.find({**here, **task.key}, Measurement.from_json) for task in tasks}
    measured = {task: one for task, one in found.items() if one is not None}
    bench.progress.stand(len(measured))
    question = {**here, "what": further.name} if further is not None else {}
    answer = bench.kept.find(question, dict) if further is not None else {}
    if len(measured) == len(tasks) and answer is not None:
        return _by_cell(phase, bench.sets, measured), answer
    bench.progress.say(f"starting the server {phase.words}")
    with bench.server_with(phase.draft, phase.speculative_tokens) as server:
        for task in tasks:
            if task not in measured:
                measured[task] = _measure(bench, phase, server, task)
                bench.kept.keep({**here, **task.key}, measured[task].to_json())
                bench.progress.add()
        if answer is None:
            assert further is not None
            bench.progress.say(further.words)
            answer = further.ask(server, _by_cell(phase, bench.sets, measured))
            bench.kept.keep(question, answer)
    return _by_cell(phase, bench.sets, measured), answer


def _measure(bench: Bench, phase: Phase, server: "RunningServer", task: Task) -> Measurement:
    recipe, cell = bench.lineage.recipe, task.cell
    name = f"{task.name} {phase.words}, {cell.in_flight} in flight at temperature {cell.temperature:g}"
    bench.progress.say(name + (f", repeat {task.repeat + 1} of {n}" if (n := phase.times[cell]) > 1 else ""))
    found = measure(
        server,
        bench.sets[task.name],
        cell.settings(recipe.evaluation),
        name=name,
        with_draft=phase.draft is not None,
        request_timeout_s=recipe.generation.request_limit_s(recipe.evaluation.max_completion_tokens),
        # vLLM's CPU backend dies of a seed.
        seed=task.repeat if recipe.partitions.evaluation else None,
    )
    # Only what is compared is worth its place in the journal: greedy replies, of which one repeat will do.
    return found if cell.temperature == 0 and task.repeat == 0 else replace(found, replies={}, prompts={})


def _by_cell(phase: Phase, sets: Sets, measured: Mapping[Task, Measurement]) -> Measured:
    return {
        cell: [{name: measured[Task(cell, repeat, name)] for name in sets} for repeat in range(times)]
        for cell, times in phase.times.items()
    }
