"""What an acceptance report was measured on: target, draft, sets, server, machine, versions.

Names and hashes, never a folder of this machine or a secret: a page is passed on.
"""

import os
import platform
import socket
import time
from pathlib import Path
from typing import Any

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.provenance import fingerprint, git_commit, versions
from eagle3_pipeline.release.names import plain, target_name, without_secrets_and_paths


def measured(lineage: Lineage) -> dict[str, Any]:
    """The report's `measured`, as JSON values; to be called on the machine that measured.

    at                   when, UTC
    recipe, report       the recipe's name, the report's fingerprint
    target, base_draft   {name, content} each; the latter None where there is none
    draft                hash of its content
    sets                 {name: hash of its file, column and count}
    server               {vllm, settings: hash, flags}: of the server without a draft
    machine              {host, processor, cores, memory_gib, gpus}
    versions, commit     of what measured

    Raises what `evaluation_server` raises.
    """
    from eagle3_pipeline.serving.specification import evaluation_server, vllm_version

    place, spec = lineage.acceptance_report(), evaluation_server(lineage, None)
    return {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "recipe": lineage.recipe.name,
        "report": place.fingerprint[:12],
        "target": {"name": target_name(lineage.recipe.target), "content": place.inputs["target"][:12]},
        "draft": place.inputs["draft"][:12],
        "base_draft": _base_draft(lineage),
        "sets": {one["name"]: fingerprint(one)[:12] for one in place.inputs["evaluation"]["sets"]},
        "server": {
            "vllm": vllm_version(spec.argv[0]),
            "settings": fingerprint(place.inputs["server"])[:12],
            "flags": without_secrets_and_paths(list(spec.argv[1:])),
        },
        "machine": _machine(spec.partition),
        "versions": versions(),
        "commit": git_commit(),
    }


def _base_draft(lineage: Lineage) -> dict[str, str] | None:
    base = lineage.recipe.base_draft
    if base is None:
        return None
    content: str = lineage.base_draft().require().facts["model_fingerprint"]
    return {"name": base.hub_id or plain(base.path.name if base.path else ""), "content": content[:12]}


def _machine(partition: tuple[str, ...]) -> dict[str, Any]:
    """What makes speeds comparable; cores are those that this process, and so the server, may use."""
    import psutil

    return {
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": _gpus(partition),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # ARM kernels tell no name


def _gpus(partition: tuple[str, ...]) -> list[str]:
    """Names of the models, one per GPU of the partition."""
    from eagle3_pipeline.serving.gpus import physical_gpus
    from eagle3_pipeline.serving.nvml import nvml

    physical = physical_gpus(partition)
    driver = nvml() if physical else None
    if driver is None:
        return list(physical)
    names = {gpu.uuid: gpu.name for gpu in driver.gpus()}
    return [names.get(one, one) for one in physical]
