"""Room on the disks that a run writes to."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from eagle3_pipeline.doctor.finding import Finding, note, ok, problem
from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.room import expected_fits, is_audited
from eagle3_pipeline.samples.state_room import gib

_GIB = 2**30
_SHARED_MEMORY = Path("/dev/shm")
_TEMPORARY = Path("/tmp")


def disks() -> Iterator[Finding]:
    """What every server and every download needs, whatever the recipe."""
    # vLLM 0.32 with one worker takes 0.4 GiB of shared memory; a container has 64 MB unless told otherwise.
    yield _disk("shared memory", _SHARED_MEMORY, 1, "Start the container with `--shm-size 16g`.")
    yield _disk("temporary files and sockets", _TEMPORARY, 1, "Free some space there.")
    yield _disk("vLLM's cache", _vllm_cache(), 1, "Free some space, or point VLLM_CACHE_ROOT elsewhere.")
    yield _disk("models", _model_cache(), 1, "Free some space, or point HF_HOME to a larger disk.")


def storage(lineage: Lineage) -> Iterator[Finding]:
    """Whether what the recipe still has to write fits below the storage root."""
    folder = lineage.storage_root
    base = _disk("the storage root", folder, 1, "Free some space, or point EAGLE3_STORAGE elsewhere.")
    if base.advice or lineage.released() is not None or is_audited(lineage):
        yield base
        return
    try:
        short, long = expected_fits(lineage)
    except MissingInput:
        yield ok(f"{base.what}; what hidden states take is known when target_model is made")
        return
    what = (
        f"the storage root {folder}: {gib(short.room.bytes)} for hidden states, which still take "
        f"{gib(short.wave_plan.needed)} to {gib(long.wave_plan.needed)} at once"
    )
    if not short.fits:
        yield problem(what, f"{short.room.why}. Choices: {'; '.join(short.choices())}.")
    elif not long.fits:
        yield note(what, "sample_audit decides when the lengths of the samples are known.")
    else:
        yield ok(what)


def privacy(lineage: Lineage) -> Iterator[Finding]:
    """Whether others may read what the recipe has made."""
    if lineage.folder.is_dir() and lineage.folder.stat().st_mode & 0o007:
        yield note(
            f"{lineage.folder} is open to all users of this machine, prompts and replies with it",
            f"If they are private: `chmod 700 {lineage.folder}`.",
        )


def _disk(purpose: str, folder: Path, gib: float, way_out: str) -> Finding:
    existing = _existing(folder)
    free = shutil.disk_usage(existing).free
    what = f"{purpose} in {folder}: {free / _GIB:.1f} GiB free, at least {gib} wanted"
    if not os.access(existing, os.W_OK):
        return problem(f"{purpose} in {folder}: {existing} cannot be written to by this user", way_out)
    return ok(what) if free >= gib * _GIB else problem(what, way_out)


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


def _vllm_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("VLLM_CACHE_ROOT") or f"{root}/vllm").expanduser()


def _model_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
