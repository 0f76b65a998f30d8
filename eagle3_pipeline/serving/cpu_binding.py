"""The cores of a machine without GPUs, shared out among the processes of a server."""

import os

from eagle3_pipeline.errors import RecipeError

BINDING_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def binding_of(ranks: int, phase: str) -> str:
    """The same number of cores for each rank, in vLLM's syntax: `0,1|2,3`; cores that are left bind nobody.

    Left alone, vLLM wants a NUMA node for each rank (vllm/utils/ompmultiprocessing.py). Raises RecipeError
    when this process may use fewer cores than ranks.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks
    if share == 0:
        raise RecipeError(
            f"server.{phase}: tensor_parallel x pipeline_parallel x data_parallel = {ranks} processes on the "
            f"CPU, but this process may use {len(cores)} cores. Make it at most {len(cores)}."
        )
    shares = (cores[rank * share : (rank + 1) * share] for rank in range(ranks))
    return "|".join(",".join(str(core) for core in one) for one in shares)
