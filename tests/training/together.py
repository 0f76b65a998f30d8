"""Trainings in processes of their own, forked from one that has imported everything."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.training.batches import pack
from eagle3_pipeline.training.checkpoint import Checkpoints
from eagle3_pipeline.training.draft import trained_parameters
from eagle3_pipeline.training.group import join
from eagle3_pipeline.training.joint_step import JointStep
from eagle3_pipeline.training.loop import Training
from eagle3_pipeline.training.meter import Meter
from eagle3_pipeline.training.objective import Objective, rows_by_step
from eagle3_pipeline.training.optimizer import Optimizer
from eagle3_pipeline.training.parent import heed_sigterm
from eagle3_pipeline.training.schedule import StepBatches, make_schedule
from eagle3_pipeline.training.weights import weight_tensors
from tests.training.tiny import DRAFT, Memory, draft, memory, plan, split

SIZES = [(6, 2)] * 63
"""Equal samples, twelve to a step: dealt out to two, three or four batches it has the same ones."""
PER_STEP = 12
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])
_LIMIT_S = 60


class Deadly(Memory):
    """Samples of which the n-th read sends its own process a signal."""

    def __init__(self, source: Memory, number: int, reads: int) -> None:
        super().__init__(source.samples)
        self._number = number
        self._left = reads

    def read(self, index: int) -> Mapping[str, torch.Tensor]:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), self._number)
        return super().read(index)


def train(
    folder: Path,
    processes: int = 1,
    source: Memory | None = None,
    sent: tuple[int, signal.Signals, int] | None = None,
    **changes: Any,
) -> list[int]:
    """Train to the end, in `processes` processes; returns their exit codes.

    `sent` are the rank that gets a signal, which one, and at which of its reads. The others' exit is waited
    for, not caused.
    """
    return _codes(_run, processes, folder, source or memory(SIZES), sent, changes)


def gradients(
    folder: Path, processes: int, sizes: Sequence[tuple[int, int]], step: StepBatches
) -> list[dict[str, torch.Tensor]]:
    """The gradients of one step before it is taken, by rank, with its `loss` and their `norm`.

    `sizes` are those of the samples, `step` the batches that the processes share.
    """
    assert _codes(_joint_step, processes, folder, memory(sizes), step) == [0] * processes
    return [load_file(folder / f"gradients-{rank}") for rank in range(processes)]


def _codes(target: Callable[..., None], processes: int, *arguments: Any) -> list[int]:
    """Exit codes of processes that run `target` together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    place |= {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(processes)}
    started = [_CONTEXT.Process(target=target, args=(rank, place, *arguments)) for rank in range(processes)]
    for one in started:
        one.start()
    for one in started:
        one.join(_LIMIT_S)
    codes = [one.exitcode for one in started]
    for one in started:
        one.kill()
        one.join()
    assert None not in codes, f"still there after {_LIMIT_S} s: {codes}"
    return [code for code in codes if code is not None]


def stop_server() -> None:
    """End the process that trainings are forked from, as multiprocessing's own tests do."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """What a training that came to its end left behind."""
    return load_file(folder / "end.safetensors")


def _joint_step(rank: int, place: dict[str, str], folder: Path, source: Memory, step: StepBatches) -> None:
    processes = _meet(rank, place)
    model, never_clipped = draft(), plan(folder, processes=processes, max_gradient_norm=1e9)
    parameters = trained_parameters(model)
    with join(processes, on_gpus=False) as group:
        joint = JointStep(
            Objective(model, never_clipped, torch.float32),
            Optimizer(parameters, never_clipped),
            group,
            torch.device("cpu"),
        )
        counts = rows_by_step((source.loss_mask(index) for batch in step for index in batch), 3)
        read = (pack(source, batch) for batch in group.mine(step))
        found = joint.gradients(step, counts, read, Meter(0, torch.arange(DRAFT)))
        gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        numbers = {"loss": torch.tensor(found.loss), "norm": torch.tensor(found.norm)}
        save_file(gradients | numbers, folder / f"gradients-{rank}")


def _meet(rank: int, place: dict[str, str]) -> int:
    """Where torch's processes meet, as torchrun tells it; returns their number."""
    torch.set_num_threads(1)
    os.environ.update(place, RANK=str(rank))
    return int(place["WORLD_SIZE"])


def _run(
    rank: int,
    place: dict[str, str],
    folder: Path,
    source: Memory,
    sent: tuple[int, signal.Signals, int] | None,
    changes: dict[str, Any],
) -> None:
    processes = _meet(rank, place)
    changed = plan(folder, processes=processes, tokens_per_step=5 * PER_STEP, **changes)
    divided = split(source)
    schedule = make_schedule(changed, divided, lambda _: True)
    read = Deadly(source, *sent[1:]) if sent and sent[0] == rank else source
    with join(processes, on_gpus=False) as group, heed_sigterm() as is_stopping:
        training = Training(
            changed,
            draft(),
            read,
            divided,
            schedule,
            Checkpoints(folder, changed.fingerprint),
            lambda kind, **values: None,
            torch.device("cpu"),
            dtype=torch.float32,
            group=group,
            is_stopping=is_stopping,
        )
        try:
            training.run()
        except QualityError as error:
            (folder / f"failed-{rank}").write_text(str(error))
            raise SystemExit(1) from error
        if group.is_first and training.is_done:
            save_file(weight_tensors(training._optimizer.parameters), folder / "end.safetensors")
    if not training.is_done:
        raise SystemExit(143)  # multiprocessing ends its processes by os._exit
