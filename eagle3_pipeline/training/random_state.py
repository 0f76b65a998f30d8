"""The state of every library's random numbers, as JSON: part of each checkpoint, one for each process."""

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The states of now, this process's GPU included where it is in use."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, following = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), following],
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Go on from the states that random_state gave."""
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
