"""The final norm and the head of a target: what it says after a state, and how probably.

states [R, H] --norm--> [R, H] --head--> logits [R, V] --sampling settings--> likeliest token, its probability

R states, H hidden size, V tokens of the target; logits are made in blocks of tokens, whatever V is
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.target_weights import TargetWeights, read_target_weights

_LOGITS_BYTES = 16 << 20  # of one block of logits: smaller ones take more time, larger ones only memory
_CANDIDATES = 64  # likeliest tokens among which top-p is found; the rest of a flat distribution is estimated
_SMALLEST = -80.0  # exp of less is no normal float32, with which a CPU is three times as slow


@dataclass(frozen=True)
class Outlook:
    """What comes after R states: the likeliest token `[R]` and its probability `[R]` when it is sampled."""

    likeliest: torch.Tensor
    probability: torch.Tensor


class Head:
    """The final norm and the head of a target."""

    def __init__(self, weights: TargetWeights, *, penalised: bool = False) -> None:
        """Raises BadInput for a target whose config names no rms_norm_eps.

        `penalised`: the server changes the probabilities in more ways than those of `outlook`.
        """
        config = weights.config
        self.penalised = penalised
        if "rms_norm_eps" not in config:
            raise BadInput(
                "the target's config has no rms_norm_eps: its final norm is no RMS norm, which is the only "
                "kind that hidden states can be checked for, and drafts be trained for"
            )
        self._epsilon = float(config["rms_norm_eps"])
        self._scale = float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)
        self._softcap = float(config.get("final_logit_softcapping") or 0.0)
        self._norm = weights.norm
        self._head = weights.head.to(torch.bfloat16)  # in which the server multiplies, several times as fast

    @classmethod
    def read(cls, model: Path) -> Self:
        """The head of the model in `model`; raises BadInput."""
        return cls(read_target_weights(model), penalised=_penalises(model))

    def to(self, device: torch.device) -> Self:
        """The same head on another device; states are then to be there, too."""
        moved = copy.copy(self)
        moved._norm, moved._head = self._norm.to(device), self._head.to(device)
        return moved

    def outlook(self, states: torch.Tensor, temperature: float, top_p: float, top_k: int) -> Outlook:
        """What comes after `states` `[R, H]` (before the norm) for these sampling settings, as in vLLM.

        That is: the temperature first, then the `top_k` likeliest (all when < 1), then the likeliest
        of these that reach `top_p` together. One block of logits is in memory at a time.
        """
        normed = self._normed(states)
        wanted = top_k if top_k > 0 else _CANDIDATES if top_p < 1 else 1
        wanted = min(wanted, len(self._head))
        best = _Likeliest(len(states), wanted, with_total=top_k <= 0, device=states.device)
        size = max(wanted, _LOGITS_BYTES // (4 * len(states)))
        for start in range(0, len(self._head), size):
            best.add(self._logits(normed, self._head[start : start + size]).div_(temperature), start)
        probabilities = best.probabilities()
        return Outlook(best.tokens[:, 0], probabilities[:, 0] / _share_kept(probabilities, top_p))

    def _normed(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        scale = wide.square().mean(dim=-1, keepdim=True).add_(self._epsilon).rsqrt_()
        unit = (wide * scale).to(torch.bfloat16)  # rounded here as well, as models do
        return (unit * self._norm).to(torch.bfloat16)

    def _logits(self, normed: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        logits = (normed @ head.T).float().mul_(self._scale)
        return logits.div_(self._softcap).tanh_().mul_(self._softcap) if self._softcap else logits


class _Likeliest:
    """The largest logits of rows whose logits come in blocks, and the sum of all exponentials."""

    def __init__(self, rows: int, wanted: int, *, with_total: bool, device: torch.device) -> None:
        self._wanted = wanted
        self._values = torch.empty(rows, 0, device=device)
        self.tokens = torch.empty(rows, 0, dtype=torch.int64, device=device)
        # Of exp(logit - the largest one).
        self._total = torch.zeros(rows, 1, device=device) if with_total else None

    def add(self, logits: torch.Tensor, first_token: int) -> None:
        """Take the logits `[R, block]` of the tokens from `first_token` on; they are overwritten."""
        values, places = _largest(logits, self._wanted)
        before = self._values[:, :1]
        self._values, kept = _largest(torch.cat([self._values, values], dim=1), self._wanted)
        self.tokens = torch.cat([self.tokens, places + first_token], dim=1).gather(1, kept)
        if self._total is not None:
            now = self._values[:, :1]
            if before.numel():
                self._total *= (before - now).exp()
            self._total += logits.sub_(now).clamp_(min=_SMALLEST).exp_().sum(dim=1, keepdim=True)

    def probabilities(self) -> torch.Tensor:
        """Those of `tokens`, `[R, wanted]`: among all tokens, or among these when there is no total."""
        if self._total is None:
            return self._values.softmax(dim=1)
        return (self._values - self._values[:, :1]).exp() / self._total


def _largest(values: torch.Tensor, wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `wanted` largest values of each row, falling, and their places."""
    if wanted == 1:  # a fifth of the time of topk
        one = values.max(dim=1, keepdim=True)
        return one.values, one.indices
    found = values.topk(min(wanted, values.shape[1]), dim=1)
    return found.values, found.indices


def _penalises(model: Path) -> bool:
    """Whether vLLM takes a penalty from the model's generation_config.json that no request of ours names."""
    path = model / "generation_config.json"
    defaults = json.loads(path.read_text()) if path.is_file() else {}
    return (defaults.get("repetition_penalty") or 1.0) != 1.0 or bool(defaults.get("min_p"))


def _share_kept(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """What the tokens that top-p keeps have together, `[R]`, from the likeliest ones' probabilities, falling.

    Where these do not reach `top_p`, the rest are many small ones that end very near to it.
    """
    if top_p >= 1:
        return torch.ones(len(probabilities), device=probabilities.device)
    sums = probabilities.cumsum(dim=1)
    kept = sums - probabilities < top_p
    return torch.where(kept, probabilities, 0.0).sum(dim=1).clamp_(min=top_p)
