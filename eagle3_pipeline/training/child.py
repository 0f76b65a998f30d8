"""The training process as its parent sees it: started, listened to, and ended with it."""

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from eagle3_pipeline.child_environment import without_secrets
from eagle3_pipeline.durable_files import write_atomic
from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.training.events import JUDGEMENTS, MARK, Listener, describe, error_of, parse
from eagle3_pipeline.training.plan import TrainingPlan

logger = logging.getLogger(__name__)

PLAN_NAME = "plan.json"
LOG_NAME = "training.log"
METRICS_NAME = "metrics.jsonl"
# For the step at work and a checkpoint; the gigabytes of a large target's draft take seconds.
_GRACE_S = 30
_LOG_TAIL = 15
# The loss curve in the facts has at most so many points: a plot needs no more.
_CURVE_POINTS = 100


def run_process(plan: TrainingPlan, on_event: Listener = lambda event: None) -> dict[str, Any]:
    """Run one training process to its end and return its facts. It ends when this call does.

    `on_event` hears of each start, step and judgement once it is recorded.
    """
    folder = Path(plan.folder)
    plan.write(folder / PLAN_NAME)
    failure: Eagle3Error | None = None
    facts: dict[str, Any] | None = None
    with (folder / LOG_NAME).open("ab") as log, _process(plan, folder, log) as process:
        for event in _events(process, log):
            _record(folder / METRICS_NAME, event)
            if (line := describe(event)) is not None:
                logger.info("%s", line)
                on_event(event)
            if event[MARK] == "done":
                facts = {name: value for name, value in event.items() if name != MARK}
            elif event[MARK] == "failed":
                failure = failure or error_of(event)  # others fail since the first one did
    if failure is not None:
        raise failure
    if facts is None:
        lines = (folder / LOG_NAME).read_text(errors="replace").splitlines()[-_LOG_TAIL:]
        tail = "\n".join(lines)
        turn = f" of turn {plan.turn}" if plan.samples is not None else ""
        raise Eagle3Error(
            f"the training process ended without a draft{turn}: it {_end(process.returncode)}. The end of "
            f"{folder / LOG_NAME}:\n{tail}\nStart it again: it goes on at its last checkpoint."
        )
    return facts


def _end(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    name = "out of memory?" if code == -signal.SIGKILL else signal.strsignal(-code)
    return f"was killed by signal {-code} ({name})"


def _events(process: subprocess.Popen[bytes], log: BinaryIO) -> Iterator[dict[str, Any]]:
    """What it tells; other text goes to the log."""
    assert process.stdout is not None
    for raw in process.stdout:
        event = parse(raw.decode(errors="replace"))
        if event is None:
            log.write(raw)
            log.flush()
        else:
            yield event


@contextlib.contextmanager
def _process(plan: TrainingPlan, folder: Path, log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The training process. Nothing is written to its stdin: its end says that nobody waits any more.

    Several are started by torchrun, which ends all when one dies, and hand each their stdin and stdout.
    """
    process = subprocess.Popen(
        [
            sys.executable,
            *_launcher(plan.processes),
            "-m",
            "eagle3_pipeline.training",
            str(folder / PLAN_NAME),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=_environment(plan),
        start_new_session=True,  # a second Ctrl-C must not reach it half-way through a checkpoint
    )
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _launcher(processes: int) -> list[str]:
    if processes == 1:
        return []
    # A machine's own name does not always lead back to it.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [*torchrun, "--nproc-per-node", str(processes)]


def _environment(plan: TrainingPlan) -> dict[str, str]:
    from eagle3_pipeline.serving.gpus import physical_gpus

    root = str(Path(__file__).parents[2])  # the package, wherever the caller's working directory is
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(physical_gpus(plan.devices))} if plan.devices else {}
    # Threads that spin while they wait for each other cost a factor of ten as soon as anything else runs.
    # And with a heap of its own, the thread that reads ahead and judges takes none of what a step gave back.
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"}
    if plan.processes > 1:  # without the advice of C++ that no unused parameters were found, see group.py
        quiet |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {**quiet, **without_secrets(os.environ), "PYTHONPATH": os.pathsep.join(paths), **visible}


def _record(path: Path, event: dict[str, Any]) -> None:
    """Append a step or a judgement to the metrics; at a start, forget what came after the checkpoint.

    Of judgements as many are kept as the checkpoint has: one of its own step may have come after it.
    """
    if event[MARK] == "start":
        write_atomic(path, "".join(_up_to(event["step"], event["judged"], _lines(path))))
    elif event[MARK] in ("step", *JUDGEMENTS):
        with path.open("a") as file:
            file.write(json.dumps(event) + "\n")


def _up_to(step: int, judged: int, lines: Iterable[str]) -> Iterator[str]:
    """Those of the steps up to `step`, and of the first `judged` judgements."""
    for line in lines:
        told = json.loads(line)
        if told[MARK] in JUDGEMENTS:
            judged -= 1
            if judged >= 0:
                yield line
        elif told["step"] <= step:
            yield line


def loss_curve(metrics: Path) -> dict[str, list[float]]:
    """Steps and losses of the metrics, thinned out evenly to what a plot needs."""
    steps = [event for line in _lines(metrics) if (event := json.loads(line))[MARK] == "step"]
    thin = max(1, math.ceil(len(steps) / _CURVE_POINTS))
    kept = steps[::-1][::thin][::-1]  # the last one is always in
    return {"steps": [event["step"] for event in kept], "loss": [round(event["loss"], 4) for event in kept]}


def _lines(path: Path) -> Iterator[str]:
    """Whole lines of the metrics; a torn last one is left out."""
    if path.exists():
        yield from (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
