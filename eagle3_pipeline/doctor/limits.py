"""Limits that the shell or the service sets for processes, against what a run of the recipe takes."""

import os
import resource
from collections.abc import Iterator

import psutil

from eagle3_pipeline.doctor.finding import Finding, note, ok, problem
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.recipe.server import PHASES

# Beside the connections: libraries, weights mapped by shard, journals, pipes.
_OTHER_FILES = 512
# Threads of one rank beside those that compute, of which there are as many as cores.
_OTHER_THREADS = 100


def limits(lineage: Lineage) -> Iterator[Finding]:
    """Open files, processes and locked memory."""
    yield _open_files(lineage.recipe)
    yield _processes(lineage.recipe)
    yield _locked_memory(lineage.recipe)


def _open_files(recipe: Recipe) -> Finding:
    in_flight = max(
        recipe.generation.most_in_flight, recipe.extraction.concurrency, recipe.evaluation.concurrency
    )
    wanted = in_flight + _OTHER_FILES
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"open files: {_in_words(limit)} allowed, {wanted:,} wanted with {in_flight} requests in flight"
    if _allows(limit, wanted):
        return ok(what)
    return problem(what, f"`ulimit -n {max(wanted, 65536)}` before the start, or LimitNOFILE of the service.")


def _processes(recipe: Recipe) -> Finding:
    settings = [recipe.server.phase(phase) for phase in PHASES]
    ranks = max(one.tensor_parallel * one.pipeline_parallel * one.data_parallel for one in settings)
    mine = [one.info for one in psutil.process_iter(["uids", "num_threads"])]
    used = sum(one["num_threads"] or 0 for one in mine if one["uids"] and one["uids"].real == os.getuid())
    wanted = used + ranks * ((os.cpu_count() or 1) + _OTHER_THREADS)
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    what = f"processes: {_in_words(limit)} allowed, {used:,} with their threads now, {wanted:,} with a server"
    if _allows(limit, wanted):
        return ok(what)
    return problem(what, "`ulimit -u unlimited` before the start, or LimitNPROC of the service.")


def _locked_memory(recipe: Recipe) -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    several = max(len(getattr(recipe.partitions, phase)) for phase in PHASES) > 1
    if limit == resource.RLIM_INFINITY or not several:
        amount = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.0f} MiB"
        return ok(f"locked memory: {amount}")
    return note(
        f"locked memory: {limit / 2**20:.0f} MiB; GPUs that talk over a network card want it unlimited",
        "When NCCL fails: `ulimit -l unlimited`, LimitMEMLOCK=infinity, or `--ulimit memlock=-1` of docker.",
    )


def _allows(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted


def _in_words(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit:,}"
