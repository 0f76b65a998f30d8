"""Do the last layer's states mean something? What the target says after them is compared with what it said.

    tokens      p0  p1  p2 | c0  c1  c2  <end>
    looked at           s2   s3  s4  s5          states after which a completion token comes
    recorded            c0   c1  c2  <end>       the token that the target chose there

After some of these states, chosen at random, the recorded token is compared with the likeliest one of
head(norm(state)). For a target that sampled with a temperature, top-k and top-p they agree as often as
the likeliest token is probable, on average; how far a count may be from that by chance is known too. States
of another row, another sample, another layer, or taken after the norm agree far less.

    T tokens of a sample, H hidden size
"""

import math
import random
from collections.abc import Mapping
from typing import Any

import torch

from eagle3_pipeline.extraction.head import Head

_TOGETHER = 256  # states per product: the head, of up to some GB, is read once for all of them
_PER_SHARD = 768  # states: a standard error of 1.8 % at most, in 0.3 s with a vocabulary of 49,152
_PER_SAMPLE = (4, 32)
_ERRORS = 3.0
_TOLERANCE, _TOLERANCE_PENALISED = 0.02, 0.15
# A greedy target took the likeliest token of logits with bfloat16's rounding, 1/8 for logits above 16, and
# states that are computed in other batches differ by as much again: near ties go either way. The same holds
# where top-k or top-p leave one token of two likely ones. There the likeliest token's probability is
# taken without them and at this temperature at least, where two logits 1/4 apart count as 73 : 27. The target
# took it more often than that, so that too much agreement is no fault then. Measured on SmolLM2, greedy, over
# 1,820 states: the recorded token was the likeliest in 98.4 %, 91.3 % are expected at this temperature.
_TEMPERATURE_FLOOR = 0.25
_SHARP_TOP_P = 0.5


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
        tolerance = _TOLERANCE_PENALISED if self._head.penalised else _TOLERANCE
        bound = max(_ERRORS * math.sqrt(self._variance) / states, tolerance, 1.5 / states)
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
