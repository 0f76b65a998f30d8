"""GPUs by their physical names, whatever a recipe and an outer CUDA_VISIBLE_DEVICES call them.

A recipe counts GPUs within an outer CUDA_VISIBLE_DEVICES, as every CUDA program does. Leases and records
are of the host, so they carry the names that lie behind it, and for one GPU always the same name: its UUID.

    outer "2,3",     recipe ("0", "1")     ->  UUIDs of GPUs 2 and 3
    outer unset,     recipe ("0", "1")     ->  UUIDs of GPUs 0 and 1
    outer "GPU-5f",  recipe ("0",)         ->  UUID of the GPU whose UUID begins like that
    any outer,       recipe ("GPU-5f..",)  ->  that UUID; recipes may name GPUs outside of the mask
    any outer,       recipe ("MIG-7c..",)  ->  that slice, a lease of its own

Indices are those of `nvidia-smi`. Without NVML names stay as they are given: ("2", "3") in the first line.
"""

import os
from collections.abc import Sequence

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.serving import nvml
from eagle3_pipeline.serving.nvml import Gpu

MASK_VARIABLE = "CUDA_VISIBLE_DEVICES"

_UUID_STARTS = ("GPU-", "MIG-")
# How drivers before 470 name a slice: its GPU and two numbers. NVML tells today's names only.
_OLD_SLICE = "MIG-GPU-"


def physical_gpus(names: tuple[str, ...]) -> tuple[str, ...]:
    """The physical names of a partition's GPUs, in its order; () is the CPU.

    They are good for leases and records, and for the CUDA_VISIBLE_DEVICES of a child. Raises RecipeError for
    GPUs that are not there, ServerRefused for a driver that cannot be asked.
    """
    if not names:
        return ()
    visible = _visible(names)
    asked = nvml.nvml()
    machine = None if asked is None else asked.gpus()
    physical = tuple(_physical(name, visible, machine) for name in names)
    for position, name in enumerate(physical):
        if name in physical[:position]:
            first = names[physical.index(name)]
            raise RecipeError(
                f"the partition {list(names)} has one GPU twice: {first} and {names[position]} both are "
                f"{name}{_behind(visible)}. Name each GPU once."
            )
    return physical


def overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether two partitions, as physical names, share a GPU; two on the CPU always do."""
    return bool(set(one) & set(other)) or (not one and not other)


def _visible(names: tuple[str, ...]) -> list[str] | None:
    """The entries of the outer mask, None when there is none; raises RecipeError where CUDA would stop."""
    mask = os.environ.get(MASK_VARIABLE)
    if mask is None:
        return None
    entries = [entry.strip() for entry in mask.rstrip(", ").split(",")]
    if entries in ([""], ["-1"]):
        raise RecipeError(
            f"{MASK_VARIABLE} is {mask!r}, which hides every GPU, but the partition wants {list(names)}. "
            "Unset it, or set the partition to cpu."
        )
    for entry in entries:
        if not entry.isdigit() and not entry.startswith(_UUID_STARTS):
            raise RecipeError(
                f"{MASK_VARIABLE} is {mask!r}, and {entry!r} in it names no GPU: CUDA would see none from "
                "there on. Expected indices or UUIDs (GPU-..., MIG-...) with commas; correct or unset it."
            )
    return entries


def _physical(name: str, visible: list[str] | None, machine: Sequence[Gpu] | None) -> str:
    """The physical name of one GPU of the partition."""
    source = "of the partition"
    if visible is not None and name.isdigit():
        if int(name) >= len(visible):
            raise RecipeError(
                f"GPU {name} of the partition does not exist: {MASK_VARIABLE} shows {len(visible)} "
                f"({','.join(visible)}), so the recipe may use 0 to {len(visible) - 1}."
            )
        name, source = visible[int(name)], f"of {MASK_VARIABLE}"
    if machine is None or name.startswith(_OLD_SLICE):
        return name
    found = [gpu for gpu in machine if _is_meant(gpu, name)]
    if not found:
        raise RecipeError(
            f"GPU {name} {source} does not exist: this machine has {_listed(machine)}. "
            "Name one of these; `nvidia-smi -L` shows them, and in a container only those that it was given."
        )
    if len(found) > 1:
        raise RecipeError(
            f"GPU {name} {source} is not one GPU: {_listed(found)} begin like that. Write more of the UUID."
        )
    return _whole_or_slice(found[0], source, machine)


def _is_meant(gpu: Gpu, name: str) -> bool:
    if name.isdigit():
        return gpu.parent is None and gpu.index == int(name)
    return gpu.uuid.startswith(name)  # CUDA takes the beginning of a UUID too, if only one GPU has it


def _whole_or_slice(gpu: Gpu, source: str, machine: Sequence[Gpu]) -> str:
    """CUDA uses no split GPU as a whole: it takes the first slice, which another recipe may name itself."""
    slices = [one for one in machine if one.parent == gpu.uuid]
    if len(slices) > 1:
        raise RecipeError(
            f"GPU {gpu.index} {source} is split (MIG), and CUDA uses one slice of it at a time: name the one "
            f"that is meant, of {', '.join(one.uuid for one in slices)}."
        )
    return slices[0].uuid if slices else gpu.uuid


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none that NVML shows"


def _behind(visible: list[str] | None) -> str:
    return f" ({MASK_VARIABLE} is {','.join(visible)!r})" if visible is not None else ""
