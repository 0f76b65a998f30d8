"""Tensors as a safetensors file: durable, errors with their number, and readable as other files are."""

import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from eagle3_pipeline.durable_files import fsync_file

_NUMBER = re.compile(r"\(os error (\d+)\)")


def write_tensors(
    tensors: dict[str, torch.Tensor],
    path: Path,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write tensors to the disk, durably; raises OSError with its number, which safetensors says in words."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        if (match := _NUMBER.search(str(error))) is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(path)) from error
    # safetensors leaves it to the owner alone; a draft is served by whoever may read the folder.
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
    fsync_file(path)
