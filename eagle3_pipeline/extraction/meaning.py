"""Do the last layer's states mean something? What the target says after them is compared with what it said.

    tokens      p0  p1  p2 | c0  c1  c2  <end>
    looked at           s2   s3  s4  s5          states after which a completion token comes
    recorded            c0   c1  c2  <end>       the token that the target chose there

After some of these states, chosen at random, the recorded token is compared with the likeliest one of
head(norm(state)). For a target that sampled with a temperature, top-k and top-p they agree as often as
the likeliest token is probable, on average; how far a count may be from that by chance is known too. States
of another row, another sample, another layer, or taken after the norm agree far less.

    T tokens of a sample, H hidden size, V tokens of the target, R states that are looked at together
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.target_weights import TargetWeights, read_target_weights

_TOGETHER = 256  # states per product: the head, of up to some GB, is read once for all of them
_LOGITS_BYTES = 16 << 20  # of one block of logits: smaller ones take more time, larger ones only memory
_CANDIDATES = 64  # likeliest tokens among which top-p is found; the rest of a flat distribution is estimated
_SMALLEST = -80.0  # exp of less is no normal float32, with which a CPU is three times as slow
_PER_SHARD = 1024  # states: a standard error of 1.5 %, for half a second with a vocabulary of 49,152
_PER_SAMPLE = (4, 32)
_ERRORS = 3.0
_TOLERANCE = 0.02
# A greedy target took the likeliest token of logits with bfloat16's rounding, 1/8 for logits above 16, and
# states that are computed in other batches differ by as much again: near ties go either way. The same holds
# where top-k or top-p leave one token of two likely ones. There the likeliest token's probability is
# taken without them and at this temperature at least, where two logits 1/4 apart count as 73 : 27. The target
# took it more often than that, so that too much agreement is no fault then. Measured on SmolLM2, greedy, over
# 1,820 states: the recorded token was the likeliest in 98.4 %, 91.3 % are expected at this temperature.
_TEMPERATURE_FLOOR = 0.25
_SHARP_TOP_P = 0.5


@dataclass(frozen=True)
class Outlook:
    """What comes after R states: the likeliest token `[R]` and its probability `[R]` when it is sampled."""

    likeliest: torch.Tensor
    probability: torch.Tensor


class Head:
    """The final norm and the head of a target."""

    def __init__(self, weights: TargetWeights) -> None:
        """Raises BadInput for a target whose config names no rms_norm_eps."""
        config = weights.config
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
        return cls(read_target_weights(model))

    def outlook(self, states: torch.Tensor, temperature: float, top_p: float, top_k: int) -> Outlook:
        """What comes after `states` `[R, H]` (before the norm) for these sampling settings, as in vLLM.

        That is: the temperature first, then the `top_k` likeliest (all when < 1), then the likeliest
        of these that reach `top_p` together. One block of logits is in memory at a time.
        """
        normed = self._normed(states)
        wanted = top_k if top_k > 0 else _CANDIDATES if top_p < 1 else 1
        best = _Likeliest(len(states), min(wanted, len(self._head)), with_total=top_k <= 0)
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

    def __init__(self, rows: int, wanted: int, *, with_total: bool) -> None:
        self._wanted = wanted
        self._values = torch.empty(rows, 0)
        self.tokens = torch.empty(rows, 0, dtype=torch.int64)
        self._total = torch.zeros(rows, 1) if with_total else None  # of exp(logit - the largest one)

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


class Meaning:
    """What was found in the states of one shard. One thread at a time."""

    def __init__(
        self, head: Head, *, temperature: float, top_p: float, top_k: int, per_sample: int, seed: int
    ) -> None:
        """The sampling settings are those the samples were recorded with; see `states_per_sample`."""
        self._head = head
        self._sharp = temperature < _TEMPERATURE_FLOOR or top_k == 1 or top_p <= _SHARP_TOP_P
        self._sampling = (temperature, top_p, top_k)
        if self._sharp:
            self._sampling = (max(temperature, _TEMPERATURE_FLOOR), 1.0, 0)
        self._per_sample = per_sample
        self._seed = seed
        self._states: list[torch.Tensor] = []
        self._recorded: list[torch.Tensor] = []
        self._waiting = 0
        self._looked_at = self._agreed = 0
        self._expected = self._variance = 0.0

    def look(
        self, sample_id: str, token_ids: torch.Tensor, loss_mask: torch.Tensor, last_states: torch.Tensor
    ) -> None:
        """Look at some states of a sample: token_ids `[T]`, loss_mask `[T]` bool, last_states `[T, H]`.

        The choice follows from the sample's id and the seed.
        """
        rows = loss_mask[1:].nonzero().flatten()
        if len(rows) > self._per_sample:
            chosen = random.Random(f"{self._seed} {sample_id}").sample(range(len(rows)), self._per_sample)
            rows = rows[chosen]
        self._states.append(last_states[rows])
        self._recorded.append(token_ids[rows + 1])
        self._waiting += len(rows)
        if self._waiting >= _TOGETHER:
            self._count()

    def verdict(self) -> str | None:
        """What is wrong with the states seen so far, as a sentence, or None."""
        self._count()
        if not self._looked_at:
            return None
        found, expected, bound = self._shares()
        over = found - expected > bound and not self._sharp
        if expected - found <= bound and not over:
            return None
        return (
            f"after {self._looked_at:,} of the last layer's states the head's likeliest token is the "
            f"recorded one in {found:.1%}, expected {expected:.1%} within {bound:.1%}: they are not what "
            "the target had before its final norm when it wrote these samples"
        )

    def counts(self) -> dict[str, float]:
        """What was counted so far; `add` takes it up again in another process."""
        self._count()
        return {
            "looked_at": self._looked_at,
            "agreed": self._agreed,
            "expected": self._expected,
            "variance": self._variance,
        }

    def add(self, counts: Mapping[str, float]) -> None:
        """Take what `counts` of an earlier process said."""
        self._looked_at += int(counts["looked_at"])
        self._agreed += int(counts["agreed"])
        self._expected += counts["expected"]
        self._variance += counts["variance"]

    def facts(self) -> dict[str, Any]:
        """States looked at, share in which the likeliest token is the recorded one, what was expected."""
        self._count()
        found, expected, bound = self._shares()
        return {
            "states": self._looked_at,
            "agreed_share": round(found, 4),
            "expected_share": round(expected, 4),
            "bound": round(bound, 4),
        }

    def _shares(self) -> tuple[float, float, float]:
        states = max(self._looked_at, 1)
        # A single odd token among few states is no verdict, however sure the target was.
        bound = max(_ERRORS * math.sqrt(self._variance) / states, _TOLERANCE, 1.5 / states)
        return self._agreed / states, self._expected / states, bound

    def _count(self) -> None:
        if not self._waiting:
            return
        states, recorded = torch.cat(self._states), torch.cat(self._recorded)
        self._states, self._recorded, self._waiting = [], [], 0
        outlook = self._head.outlook(states, *self._sampling)
        self._looked_at += len(states)
        self._agreed += int((outlook.likeliest == recorded).sum())
        self._expected += float(outlook.probability.sum())
        self._variance += float((outlook.probability * (1 - outlook.probability)).sum())


def states_per_sample(samples: int) -> int:
    """How many states of each sample are looked at in a shard of `samples`."""
    fewest, most = _PER_SAMPLE
    return min(most, max(fewest, math.ceil(_PER_SHARD / max(samples, 1))))


def _share_kept(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """What the tokens that top-p keeps have together, `[R]`, from the likeliest ones' probabilities, falling.

    Where these do not reach `top_p`, the rest are many small ones that end very near to it.
    """
    if top_p >= 1:
        return torch.ones(len(probabilities))
    sums = probabilities.cumsum(dim=1)
    kept = sums - probabilities < top_p
    return torch.where(kept, probabilities, 0.0).sum(dim=1).clamp_(min=top_p)
