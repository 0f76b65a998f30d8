"""What is trained, and the optimizer's state, as safetensors files."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from eagle3_pipeline.errors import DamagedFile


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


def optimizer_tensors(
    parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """AdamW's state by parameter name: `<name>.exp_avg`, `<name>.exp_avg_sq`, `<name>.step`."""
    tensors = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = torch.as_tensor(value).detach().float().cpu().contiguous().clone()
    return tensors


def load_optimizer(
    path: Path, parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Give `optimizer` the state that optimizer_tensors was written from."""
    for full_name, value in load_file(path).items():
        name, key = full_name.rsplit(".", 1)
        # The step count stays where AdamW made it (the CPU, unless fused on a GPU); moments go to their
        # parameter.
        parameter = parameters[name]
        on_device = key != "step" or bool(optimizer.defaults.get("fused"))
        optimizer.state[parameter][key] = value.to(parameter.device) if on_device else value
