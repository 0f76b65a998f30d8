"""Trainings in processes of their own, forked from one that has imported everything."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.training.checkpoint import Checkpoints
from eagle3_pipeline.training.group import join
from eagle3_pipeline.training.loop import Training
from eagle3_pipeline.training.parent import heed_sigterm
from eagle3_pipeline.training.schedule import make_schedule
from eagle3_pipeline.training.weights import weight_tensors
from tests.training.tiny import Memory, draft, memory, plan, split

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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (folder, processes, port, source or memory(SIZES), sent, changes)
    started = [_CONTEXT.Process(target=_run, args=(rank, *arguments)) for rank in range(processes)]
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


def _run(
    rank: int,
    folder: Path,
    processes: int,
    port: int,
    source: Memory,
    sent: tuple[int, signal.Signals, int] | None,
    changes: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(place, RANK=str(rank), WORLD_SIZE=str(processes))
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
