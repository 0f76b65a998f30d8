"""Do the last layer's states mean something? What the target says after them is compared with what it said.

    tokens      p0  p1  p2 | c0  c1  c2  <end>
    looked at           s2   s3  s4  s5          states after which a completion token comes
    recorded            c0   c1  c2  <end>       the token that the target chose there

After some of these states, chosen at random, the recorded token is compared with the likeliest one of
head(norm(state)). For a target that sampled with a temperature, top-k and top-p they agree as often as
the likeliest token is probable, on average; how far a count may be from that by chance is known too. States
of another row, another sample, another layer, or taken after the norm agree far less.

One right shard in 400 is outside three standard errors by chance, and would be so in each attempt. So other
states of the same samples are kept, and looked at only when the first ones fail. They save a shard whose
first states are within 4.5 errors, if they and all together are as expected. Wrong states are ten errors
off and more, also those of an earlier process, of which no others are kept.

A state costs a product with the whole head, 2 x V x H operations: with SmolLM2's (49,152 x 576) 0.3 s a shard
on one thread. With a head of 163,840 x 7,168, a shard of 500 samples takes 2.35 TFLOP: about half a
minute on one thread, so all cores work on it where the server is on GPUs.

    T tokens of a sample, H hidden size, V tokens of the target
"""

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from eagle3_pipeline.extraction.head import Head, Outlook

_TOGETHER = 256  # states per product: the head, of up to some GB, is read once for all of them
_PER_SHARD = 128  # states: a standard error of 4.4 % at most, and wrong ones agree by a third less
_PER_SAMPLE = (1, 32)
_ERRORS, _ERRORS_AT_MOST = (
    3.0,
    4.5,
)  # by chance 1 in 400 shards is beyond the one, 1 in 150,000 beyond the other
_RESERVE = 4096  # states of a shard that are kept for a second look: 60 MB of a hidden size of 7,168
_RESERVE_TIMES = 2  # of a sample at most so many times those of the first look
_TOLERANCE, _TOLERANCE_PENALISED = 0.02, 0.15
# A greedy target took the likeliest token of logits with bfloat16's rounding, 1/8 for logits above 16, and
# states that are computed in other batches differ by as much again: near ties go either way. The same holds
# where top-k or top-p leave one token of two likely ones. There the likeliest token's probability is
# taken without them and at this temperature at least, where two logits 1/4 apart count as 73 : 27. The target
# took it more often than that, so that too much agreement is no fault then. Measured on SmolLM2, greedy, over
# 1,820 states: the recorded token was the likeliest in 98.4 %, 91.3 % are expected at this temperature.
_TEMPERATURE_FLOOR = 0.25
_SHARP_TOP_P = 0.5


@dataclass
class _Tally:
    """How often the recorded token was the likeliest, and was expected to be."""

    states: int = 0
    agreed: int = 0
    expected: float = 0.0
    variance: float = 0.0

    def count(self, outlook: Outlook, recorded: torch.Tensor) -> None:
        self.states += len(recorded)
        self.agreed += int((outlook.likeliest == recorded).sum())
        self.expected += float(outlook.probability.sum())
        self.variance += float((outlook.probability * (1 - outlook.probability)).sum())

    def __add__(self, other: "_Tally") -> "_Tally":
        return _Tally(
            self.states + other.states,
            self.agreed + other.agreed,
            self.expected + other.expected,
            self.variance + other.variance,
        )

    def shares(self, tolerance: float, errors: float = _ERRORS) -> tuple[float, float, float]:
        """The share that agreed, the one expected, and how far apart they may be: so many standard errors."""
        states = max(self.states, 1)
        # A single odd token among few states is no verdict, however sure the target was.
        bound = max(errors * math.sqrt(self.variance) / states, tolerance, 1.5 / states)
        return self.agreed / states, self.expected / states, bound


@dataclass
class _Waiting:
    """States that are not counted yet, and the tokens that were recorded after them."""

    states: list[torch.Tensor] = field(default_factory=list)
    recorded: list[torch.Tensor] = field(default_factory=list)
    number: int = 0

    def add(self, states: torch.Tensor, recorded: torch.Tensor) -> None:
        self.states.append(states)
        self.recorded.append(recorded)
        self.number += len(recorded)


class Meaning:
    """What was found in the states of one shard. One thread at a time."""

    def __init__(
        self, head: Head, *, temperature: float, top_p: float, top_k: int, samples: int, seed: int
    ) -> None:
        """The sampling settings are those the samples were recorded with; `samples` are in the shard."""
        self._head = head
        self._sharp = temperature < _TEMPERATURE_FLOOR or top_k == 1 or top_p <= _SHARP_TOP_P
        self._sampling = (temperature, top_p, top_k)
        if self._sharp:
            self._sampling = (max(temperature, _TEMPERATURE_FLOOR), 1.0, 0)
        self._tolerance = _TOLERANCE_PENALISED if head.penalised else _TOLERANCE
        self._per_sample = states_per_sample(samples)
        # Of each sample alike, or states that go wrong late in a shard would not be among them.
        self._reserved = min(_RESERVE_TIMES * self._per_sample, max(1, _RESERVE // max(samples, 1)))
        self._seed = seed
        self._waiting, self._reserve = _Waiting(), _Waiting()
        self._first, self._second = _Tally(), _Tally()

    def look(
        self, sample_id: str, token_ids: torch.Tensor, loss_mask: torch.Tensor, last_states: torch.Tensor
    ) -> None:
        """Look at some states of a sample: token_ids `[T]`, loss_mask `[T]` bool, last_states `[T, H]`.

        The choice follows from the sample's id and the seed.
        """
        rows = loss_mask[1:].nonzero().flatten()
        if len(rows) > self._per_sample:
            chance = random.Random(f"{self._seed} {sample_id}")
            rows = rows[chance.sample(range(len(rows)), min(len(rows), self._per_sample + self._reserved))]
        now, later = rows[: self._per_sample], rows[self._per_sample :]
        self._waiting.add(last_states[now], token_ids[now + 1])
        if len(later):
            self._reserve.add(last_states[later], token_ids[later + 1])
        if self._waiting.number >= _TOGETHER:
            self._count()

    def verdict(self) -> str | None:
        """What is wrong with the states seen so far, as a sentence, or None."""
        self._count()
        if self._is_as_expected(self._first) or self._was_chance():
            return None
        found, expected, bound = self._first.shares(self._tolerance)
        return (
            f"after {self._first.states:,} of the last layer's states the head's likeliest token is the "
            f"recorded one in {found:.1%}, expected {expected:.1%} within {bound:.1%}: they are not what "
            "the target had before its final norm when it wrote these samples"
        )

    def counts(self) -> dict[str, float]:
        """What was counted so far; `add` takes it up again in another process.

        Nothing waits beyond this: what a part's note lacks, nobody would ever count.
        """
        self._count()
        return asdict(self._first)

    def add(self, counts: Mapping[str, float]) -> None:
        """Take what `counts` of an earlier process said."""
        self._first.states += int(counts["states"])
        self._first.agreed += int(counts["agreed"])
        self._first.expected += counts["expected"]
        self._first.variance += counts["variance"]

    def facts(self) -> dict[str, Any]:
        """States looked at, share in which the likeliest token is the recorded one, what was expected."""
        self._count()
        found, expected, bound = self._first.shares(self._tolerance)
        return {
            "states": self._first.states,
            "agreed_share": round(found, 4),
            "expected_share": round(expected, 4),
            "bound": round(bound, 4),
        }

    def _was_chance(self) -> bool:
        """Whether the first states may well be the unlucky ones among right ones."""
        if not self._is_as_expected(self._first, _ERRORS_AT_MOST):
            return False
        reserve, self._reserve = self._reserve, _Waiting()
        self._tally(reserve, self._second)
        if not self._is_as_expected(self._second):
            return False
        # Short completions leave few other states or none, which could not make up for the first.
        few = self._second.states < self._first.states
        return few or self._is_as_expected(self._first + self._second)

    def _is_as_expected(self, tally: _Tally, errors: float = _ERRORS) -> bool:
        found, expected, bound = tally.shares(self._tolerance, errors)
        return expected - found <= bound and (self._sharp or found - expected <= bound)

    def _count(self) -> None:
        waiting, self._waiting = self._waiting, _Waiting()
        self._tally(waiting, self._first)

    def _tally(self, waiting: _Waiting, tally: _Tally) -> None:
        """Count what waits, some states at a time."""
        if not waiting.number:
            return
        states, recorded = torch.cat(waiting.states), torch.cat(waiting.recorded)
        for start in range(0, len(recorded), 2 * _TOGETHER):
            some = slice(start, start + 2 * _TOGETHER)
            tally.count(self._head.outlook(states[some], *self._sampling), recorded[some])


def states_per_sample(samples: int) -> int:
    """How many states of each sample are looked at in a shard of `samples`."""
    fewest, most = _PER_SAMPLE
    return min(most, max(fewest, _PER_SHARD // max(samples, 1)))
