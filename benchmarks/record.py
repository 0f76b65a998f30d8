"""Keeps measured numbers in benchmarks/results/<name>.json, with the commit and the machine they are of."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil

from eagle3_pipeline.provenance import git_commit, versions

RESULTS = Path(__file__).parent / "results"


def warn_of_changes() -> None:
    """Say before a measurement that the commit in its result will not name all that is measured."""
    if git_commit().endswith("+"):
        print("tracked files differ from the commit, so that the result will bear a +: commit them first")


def record(name: str, numbers: dict[str, Any]) -> Path:
    """Write the numbers of one measurement, in place of those of an earlier one, and return the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    value = {
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": git_commit(),
        "machine": machine(),
        "versions": versions(),
        "numbers": numbers,
    }
    path.write_text(json.dumps(value, indent=2) + "\n")
    return path


def machine() -> dict[str, Any]:
    """Processor, cores and memory of this machine; no name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
