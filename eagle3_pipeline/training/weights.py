"""What is trained, as a safetensors file."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from eagle3_pipeline.errors import DamagedFile


def weight_tensors(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """The parameters by name, float32 on the CPU."""
    return {name: one.detach().float().cpu().contiguous() for name, one in parameters.items()}


def load_weights(path: Path, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Put the tensors of a file into the parameters; raises DamagedFile where it has others."""
    weights = load_file(path)
    shapes = {name: tuple(one.shape) for name, one in parameters.items()}
    if {name: tuple(one.shape) for name, one in weights.items()} != shapes:
        raise DamagedFile(
            f"{path} has other tensors than the draft: {sorted(set(weights) ^ set(shapes))[:5]}"
        )
    with torch.no_grad():
        for name, one in parameters.items():
            one.copy_(weights[name])
