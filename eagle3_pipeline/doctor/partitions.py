"""The memory of a recipe's partitions: what is free, what is wanted, and who holds the rest."""

from collections.abc import Iterator

import psutil

from eagle3_pipeline.doctor.finding import Finding, note, ok, problem
from eagle3_pipeline.doctor.leases import held
from eagle3_pipeline.doctor.records import records
from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.host_memory import available_bytes
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.recipe.partitions import Partitions
from eagle3_pipeline.recipe.server import PHASES
from eagle3_pipeline.room import memory_wanted
from eagle3_pipeline.serving import nvml
from eagle3_pipeline.serving.gpu_memory import holder_in_words, pids_are_told
from eagle3_pipeline.serving.gpus import physical_gpus
from eagle3_pipeline.serving.lease import lease_names
from eagle3_pipeline.serving.nvml import Gpu
from eagle3_pipeline.serving.process import find_family


def partitions(lineage: Lineage) -> Iterator[Finding]:
    """A line per GPU that a phase uses, or one for the CPU; another per process that is not of ours."""
    phases: dict[str, list[str]] = {}
    for phase in Partitions.model_fields:
        for gpu in physical_gpus(getattr(lineage.recipe.partitions, phase)) or ("cpu",):
            phases.setdefault(gpu, []).append(phase)
    answers = nvml.nvml()
    machine = {gpu.uuid: gpu for gpu in answers.gpus()} if answers else {}
    for name, users in phases.items():
        if name == "cpu":
            yield _cpu(lineage)
        elif name in machine:
            yield from _gpu(lineage.recipe, machine[name], users)
        else:
            yield problem(
                f"GPU {name}, wanted for {', '.join(users)}: no driver shows a GPU of this name here",
                "See the lines on driver and GPUs above, or correct partitions in the recipe.",
            )


def _cpu(lineage: Lineage) -> Finding:
    available, total = available_bytes(), psutil.virtual_memory().total
    what = f"the CPU: {available / 2**30:.1f} of {total / 2**30:.1f} GiB of memory available"
    ours = [record for record in records() if record.overlaps(()) and record.state() != "failed"]
    if ours:
        return ok(f"{what}; {ours[0]} holds some of it, which the next step uses or stops")
    try:
        target = lineage.target_model().require()
    except MissingInput:
        return ok(f"{what}; what is wanted is known when target_model is made")
    wanted = memory_wanted(lineage.recipe, int(target.facts["bytes"]))
    what += f", a server takes {wanted / 2**30:.1f}"
    if available < wanted:
        return problem(what, "Stop other programs, or lower server.common.cpu_kv_cache_gib.")
    return ok(what)


def _gpu(recipe: Recipe, gpu: Gpu, users: list[str]) -> Iterator[Finding]:
    ours = _our_processes(gpu.uuid)
    strangers = [one for one in gpu.processes if one.pid not in ours] if pids_are_told((gpu,)) else []
    for one in strangers:
        yield note(
            f"{gpu}: {holder_in_words(one)} is not of this pipeline",
            "It is never ended from here. End it yourself, or give the recipe other GPUs.",
        )
    shares = [recipe.server.phase(one).gpu_memory_utilization for one in users if one in PHASES]
    wanted = max(shares, default=0) * gpu.total_bytes
    free, total = gpu.free_bytes / 2**30, gpu.total_bytes / 2**30
    what = f"{gpu} for {', '.join(users)}: {free:.1f} of {total:.1f} GiB free"
    if wanted:
        what += f", gpu_memory_utilization {max(shares):g} wants {wanted / 2**30:.1f}"
    if gpu.free_bytes >= wanted:
        yield ok(what)
    elif ours:
        yield ok(f"{what}; this pipeline works there, and the next step waits for it, uses it or stops it")
    else:
        yield problem(
            what,
            "Free it (`nvidia-smi` shows who has it; in a container it may be another container), take other "
            "GPUs, or lower gpu_memory_utilization.",
        )


def _our_processes(gpu: str) -> set[int]:
    """Processes of our servers on a GPU, and of the steps that hold it with what they started."""
    ours = set()
    for record in records():
        if record.overlaps((gpu,)) and not record.foreign:
            ours |= {process.pid for process in find_family(record.process, record.marker)}
    for holder in held():
        if holder.lease in lease_names((gpu,)) and holder.here and psutil.pid_exists(holder.pid):
            step = psutil.Process(holder.pid)
            ours |= {step.pid, *(child.pid for child in step.children(recursive=True))}
    return ours
