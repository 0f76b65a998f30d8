"""GPU partitions of a recipe: which GPUs each phase uses; `cpu` on a machine without any."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from eagle3_pipeline.recipe.strict import Strict


def _gpu_names(value: Any) -> Any:
    """Accept `cpu`, an index, a range such as `0-7`, or a list of indices and UUIDs."""
    if value == "cpu":
        return ()
    if isinstance(value, str) and value.count("-") == 1 and value.replace("-", "").isdigit():
        first, last = (int(end) for end in value.split("-"))
        if first > last:
            raise ValueError(f"the range {value} runs backwards")
        return tuple(str(index) for index in range(first, last + 1))
    items = value if isinstance(value, (list, tuple)) else [value]
    names = tuple(str(item) for item in items)
    for item in items:
        is_index = isinstance(item, int) and not isinstance(item, bool) and item >= 0
        if not is_index and not str(item).startswith(("GPU-", "MIG-")) and not str(item).isdigit():
            raise ValueError(
                f"{item!r} is no GPU: write cpu, an index, a range like 0-7, or a UUID (GPU-..., MIG-...)"
            )
    if not names:
        raise ValueError("an empty list of GPUs: write cpu for a machine without GPUs")
    if len(set(names)) != len(names):
        raise ValueError(f"the same GPU twice in {list(names)}")
    return names


GpuNames = Annotated[tuple[str, ...], BeforeValidator(_gpu_names), Field(strict=False)]


class Partitions(Strict):
    """GPUs of each phase. Phases that overlap exclude each other; the others may run side by side.

    A value is `cpu`, an index, a range (`0-7`), or a list of indices or UUIDs. Indices count within
    an outer CUDA_VISIBLE_DEVICES, where one is set. An empty tuple in code means the CPU.
    """

    generation: GpuNames = Field(default=(), description="GPUs of the server that answers prompts")
    extraction: GpuNames = Field(default=(), description="GPUs of the server that captures hidden states")
    training: GpuNames = Field(default=(), description="GPUs of the training process")
    evaluation: GpuNames = Field(default=(), description="GPUs of the servers that measure the draft")
