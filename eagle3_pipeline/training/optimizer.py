"""The optimizer of the draft: AdamW, or Muon with AdamW beside it; rates by part, and state by name.

    part      parameters                        by Muon, where that is wanted
    fusion    fc.*, fc_norm.*, input_norm.*     fc.weight
    layer     layers.*                          its matrices
    norm      norm.*
    head      lm_head.*

One step, with r = learning rate * the part's rate * its share by the schedule:

    gradients   clipped to a norm over all parts
    pull        p <- p - r * pull * (p - start)     decoupled, as weight decay is
    update      by AdamW or Muon with the rate r
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from eagle3_pipeline.training.draft import trained_parameters
from eagle3_pipeline.training.plan import TrainingPlan

# AdamW as EAGLE-3 and speculators set it: a shorter memory of squares than torch's 0.999.
_BETAS = (0.9, 0.95)
_PARTS = {
    "fc": "fusion",
    "fc_norm": "fusion",
    "input_norm": "fusion",
    "layers": "layer",
    "norm": "norm",
    "lm_head": "head",
}


def part_of(name: str) -> str:
    """The part that a trained parameter belongs to."""
    return _PARTS[name.split(".", 1)[0]]


def is_for_muon(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes a trained parameter, where it is wanted: matrices, but not the head."""
    return parameter.ndim == 2 and part_of(name) != "head"


def freeze_parts(model: Any, rates: dict[str, float]) -> None:
    """Take the parts whose rate is 0 out of the training."""
    for name, one in trained_parameters(model).items():
        if not rates[part_of(name)]:
            one.requires_grad_(False)


class Optimizer:
    """Steps of all trained parameters, and their state in float32."""

    def __init__(self, parameters: dict[str, Parameter], plan: TrainingPlan) -> None:
        """Take `parameters` as they are now for the start that they are pulled to."""
        self.parameters = parameters
        self._plan = plan
        # Never saved: a training that goes on makes its start again from the seed or the base draft.
        self._start = {name: one.detach().clone() for name, one in parameters.items() if plan.pull_to_start}
        is_muon = plan.optimizer == "muon"
        orthogonal = {name for name, one in parameters.items() if is_muon and is_for_muon(name, one)}
        settings: dict[str, Any] = {"lr": plan.learning_rate, "weight_decay": plan.weight_decay}
        self._optimizers: list[torch.optim.Optimizer] = []
        if groups := self._groups(name for name in parameters if name not in orthogonal):
            self._optimizers.append(torch.optim.AdamW(groups, betas=_BETAS, fused=True, **settings))
        if groups := self._groups(name for name in parameters if name in orthogonal):
            # Scaled so that an update is as large as one of AdamW: both take the same rates.
            self._optimizers.append(torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw", **settings))

    def _groups(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Parameters by part."""
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(part_of(name), []).append(name)
        return [
            {
                "params": [self.parameters[name] for name in mine],
                "names": mine,
                "rate": self._plan.rates[part],
            }
            for part, mine in groups.items()
        ]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for one in self.parameters.values():
            one.grad = None

    def clip(self) -> float:
        """Clip the gradients to `max_gradient_norm`; returns the norm that they had."""
        return float(
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), self._plan.max_gradient_norm)
        )

    def step(self, share: float) -> None:
        """One step at `share` of the peak learning rate."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._plan.learning_rate * group["rate"] * share
                if self._start:
                    self._pull(group)
            optimizer.step()

    @torch.no_grad()
    def _pull(self, group: dict[str, Any]) -> None:
        weight = group["lr"] * self._plan.pull_to_start
        for name, one in zip(group["names"], group["params"], strict=True):
            one.lerp_(self._start[name], weight)

    def tensors(self) -> dict[str, Tensor]:
        """The state by parameter, float32 on the CPU: `<name>.exp_avg`, `<name>.momentum_buffer`, ...

        On the CPU they are no copies: the next step changes them.
        """
        return {
            f"{name}.{key}": torch.as_tensor(value).detach().float().cpu().contiguous()
            for name, parameter in self.parameters.items()
            for key, value in self._state_of(parameter).items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take a copy of the state that `tensors` gave: tensors of a file hold on to it as long as they live.

        A fused AdamW has its step counts beside the parameters.
        """
        for full_name, value in tensors.items():
            name, key = full_name.rsplit(".", 1)
            parameter = self.parameters[name]
            self._state_of(parameter)[key] = value.to(parameter.device, copy=True)

    def _state_of(self, parameter: Parameter) -> dict[str, Any]:
        """Its state, in the optimizer that has it; empty before the first step."""
        for optimizer in self._optimizers:
            if any(parameter is one for group in optimizer.param_groups for one in group["params"]):
                state: dict[str, Any] = optimizer.state[parameter]
                return state
        raise AssertionError("every parameter is in one of the optimizers")
