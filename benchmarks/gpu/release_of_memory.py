"""How long the memory of a stopped vLLM server takes to come back. Has to be run on a machine with GPUs:

    python -m benchmarks.gpu.release_of_memory MODEL_FOLDER --gpus 0-7 --cycles 3

Starts and stops the server as the steps do, prints once a second what is in use on each GPU, and writes
benchmarks/results/gpu-release-of-memory.json. Without a GPU it says so and exits with 2.
"""

import argparse
import json
import logging
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.record import record
from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.recipe.partitions import Partitions
from eagle3_pipeline.serving import nvml
from eagle3_pipeline.serving.gpu_memory import read_memory
from eagle3_pipeline.serving.gpus import physical_gpus
from eagle3_pipeline.serving.server import open_server, stop_servers
from eagle3_pipeline.serving.specification import ServerSpec, generation_server
from eagle3_pipeline.target import make_target

_SAMPLE_S = 0.1
_BACK_WITHIN_BYTES = 2**28  # a desktop or a monitor beside it may take a little meanwhile
_LIMIT_S = 120.0
_AFTER_S = 2.0


class Usage:
    """Samples what is in use on the GPUs, in a thread, and prints it once a second."""

    def __init__(self, gpus: tuple[str, ...]) -> None:
        self._gpus = gpus
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.doing = "before"
        self.used: list[int] = []
        """Bytes in use per GPU, as sampled last."""

    def __enter__(self) -> "Usage":
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        self.used = [gpu.used_bytes for gpu in read_memory(self._gpus)]

    def _run(self) -> None:
        told = -1
        while not self._ended.wait(_SAMPLE_S):
            self._sample()
            seconds = int(time.monotonic() - self._began)
            if seconds > told:
                told = seconds
                print(f"{seconds:5d} s  {self.doing:<9} {_in_gib(self.used)} GiB in use", flush=True)


def _in_gib(counts: list[int]) -> list[float]:
    return [round(count / 2**30, 2) for count in counts]


def _cycle(spec: ServerSpec, usage: Usage, folder: Path, hold_s: float) -> dict[str, Any]:
    """Start, hold and stop the server once."""
    usage.doing = "before"
    before = list(usage.used)
    usage.doing, began = "starting", time.monotonic()
    with open_server(spec, folder):
        ready_s = time.monotonic() - began
        usage.doing = "running"
        time.sleep(hold_s)
        running = list(usage.used)
    usage.doing, began = "stopping", time.monotonic()
    with ThreadPoolExecutor(1) as beside:  # stopping has a rule of its own for memory that is back
        stop = beside.submit(_stop, spec)
        while not _is_back(before, usage.used):
            if time.monotonic() - began > _LIMIT_S:
                counts = f"{_in_gib(usage.used)} GiB in use, {_in_gib(before)} before the start"
                raise TimeoutError(f"memory is not back {_LIMIT_S:.0f} s after the stop: {counts}")
            time.sleep(_SAMPLE_S / 2)
        back_s = time.monotonic() - began
        stopped_s = stop.result() - began
    usage.doing = "after"
    time.sleep(_AFTER_S)
    return {
        "seconds_to_ready": round(ready_s, 1),
        "seconds_from_stop_to_memory_back": round(back_s, 2),
        "seconds_from_stop_to_stopped": round(stopped_s, 2),
        "gib_in_use": {
            "before": _in_gib(before),
            "running": _in_gib(running),
            "after": _in_gib(usage.used),
        },
    }


def _stop(spec: ServerSpec) -> float:
    """When the server was gone by this project's own rules."""
    stop_servers(spec.partition, only=spec.fingerprint)
    return time.monotonic()


def _is_back(before: list[int], now: list[int]) -> bool:
    return len(before) == len(now) and all(
        used <= was + _BACK_WITHIN_BYTES for was, used in zip(before, now, strict=True)
    )


def _specify(options: argparse.Namespace, storage: Path) -> ServerSpec:
    """The generation server of a recipe that has nothing but this model."""
    model = options.model.absolute()
    config = json.loads((model / "config.json").read_text())
    layers = (config.get("text_config") or config)["num_hidden_layers"]
    partitions = Partitions.model_validate({"generation": options.gpus})
    settings = {
        "tensor_parallel": len(partitions.generation),
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "python": options.python,
    }
    values = {
        "name": "release-of-memory",
        "target": {"path": str(model)},
        "partitions": partitions,
        "server": {"generation": settings},
        "prompts": {"sources": [{"path": "none.jsonl"}], "count": 1, "per_shard": 1},
        "extraction": {"layers": [1, layers]},
        "evaluation": {"sets": [{"name": "none", "path": "none.jsonl"}]},
    }
    lineage = Lineage(Recipe.model_validate(values), storage)
    make_target(lineage)
    return generation_server(lineage)


def _measure(options: argparse.Namespace, driver: nvml.Nvml) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        storage = Path(folder)
        spec = _specify(options, storage)
        gpus = physical_gpus(spec.partition)
        stop_servers(spec.partition)
        with Usage(gpus) as usage:
            cycles = [_cycle(spec, usage, storage, options.hold_s) for _ in range(options.cycles)]
        seconds = [cycle["seconds_from_stop_to_memory_back"] for cycle in cycles]
        return record(
            "gpu-release-of-memory",
            {
                "model": options.model.name,
                "gpus": [gpu.name for gpu in read_memory(gpus)],
                "driver": driver.driver(),
                "gpu_memory_utilization": options.gpu_memory_utilization,
                "longest_seconds_from_stop_to_memory_back": max(seconds),
                "cycles": cycles,
            },
        )


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a model that vLLM serves")
    parser.add_argument("--gpus", default="0", help="as in a recipe's partitions: 0, 0-7, a UUID")
    parser.add_argument("--python", type=Path, help="the Python that has vLLM, by default this one")
    parser.add_argument("--cycles", type=int, default=3, help="how often to start and stop")
    parser.add_argument("--hold-s", type=float, default=5, help="seconds for which each server runs")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    options = parser.parse_args(arguments)
    try:
        driver = nvml.nvml()
        if driver is None or not driver.gpus():
            print("no GPU here: NVML shows none. Run this on a machine with GPUs.", file=sys.stderr)
            return 2
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        print(f"written: {_measure(options, driver)}")
    except (Eagle3Error, TimeoutError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
