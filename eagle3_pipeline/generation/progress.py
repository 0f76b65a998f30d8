"""The pulse of a collection: what is done, how fast, what went wrong, and how long it may take.

Pure: events go in with the clock that it was given, a line comes out. Tokens count when their reply
is in, so that a young run looks slower than it is; `now` looks at the last half minute only.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagle3_pipeline.duration import in_words
from eagle3_pipeline.generation.concurrency import Reading
from eagle3_pipeline.samples.sample import Sample

_WINDOW_S = 30.0
# Before so many replies a rate says nothing, and no time left is given.
_LEAST_REPLIES = 8


@dataclass(frozen=True)
class Vitals:
    """The numbers of a pulse at one moment."""

    text: str

    def line(self) -> str:
        """One line for people."""
        return self.text

    def to_json(self) -> dict[str, Any]:
        """All numbers as JSON values."""
        return {"line": self.text}


class Pulse:
    """Counts of one call of a collection. `total` and `before` are turns, `before` those of earlier calls."""

    def __init__(
        self, total: int, before: int, longest: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total = total
        self.before = before
        self.replies = 0
        self.tokens = 0
        self.truncated = 0
        self.in_flight = 0
        self.errors: Counter[str] = Counter()
        self._clock = clock
        self._start: float | None = None
        self._recent: deque[tuple[float, int]] = deque()

    def sent(self, name: str) -> None:
        """A request is on its way."""
        if self._start is None:
            self._start = self._clock()  # the minutes that a server takes to start are not in the rates
        self.in_flight += 1

    def returned(self, name: str) -> None:
        """A request came back, whatever came of it."""
        self.in_flight -= 1

    def replied(self, sample: Sample) -> None:
        """A turn is done."""
        completion_tokens = len(sample.completion_token_ids)
        self.replies += 1
        self.tokens += completion_tokens
        self.truncated += sample.verdict == "truncated"
        self._recent.append((self._clock(), completion_tokens))

    def measured(self, reading: Reading) -> None:
        """The server's metrics were read."""

    def failed(self, reason: str) -> None:
        """An attempt failed; the turn stays to be done."""
        self.errors[reason] += 1

    def dropped(self, turns: int) -> None:
        """So many turns will not be asked, because their conversation ended early."""
        self.total -= turns

    @property
    def done(self) -> int:
        """Turns that have their reply."""
        return self.before + self.replies

    def rates(self) -> tuple[float, float, float, float]:
        """Requests and tokens per second now, then both on the mean since the first request."""
        elapsed = self._clock() - self._start if self._start is not None else 0.0
        window = min(_WINDOW_S, elapsed)
        while self._recent and self._recent[0][0] < self._clock() - _WINDOW_S:
            self._recent.popleft()
        tokens = sum(count for _, count in self._recent)
        if elapsed <= 0:
            return 0.0, 0.0, 0.0, 0.0
        return len(self._recent) / window, tokens / window, self.replies / elapsed, self.tokens / elapsed

    def time_left_s(self) -> tuple[float, float] | None:
        """Seconds left at the better and at the worse of the two rates; None while nothing can be said."""
        now, _, mean, _ = self.rates()
        rates = [rate for rate in (now, mean) if rate > 0]
        if self.replies < _LEAST_REPLIES or not rates:
            return None
        left = self.total - self.done
        return left / max(rates), left / min(rates)

    def vitals(self) -> "Vitals":
        """All numbers now."""
        return Vitals(self._line())

    def _line(self) -> str:
        now, tokens_now, mean, tokens_mean = self.rates()
        earlier = f" ({self.before} from before)" if self.before else ""
        parts = [
            f"{self.done}/{self.total} replies{earlier}",
            f"{self.in_flight} in flight",
            f"{now:.1f} requests/s and {tokens_now:.0f} tokens/s now ({mean:.1f} and {tokens_mean:.0f} mean)",
        ]
        if self.replies:
            parts.append(f"mean length {self.tokens / self.replies:.0f} tokens")
            parts.append(f"{self.truncated / self.replies:.1%} truncated")
        if self.errors:
            parts.append("errors: " + ", ".join(f"{n} x {why}" for why, n in self.errors.most_common()))
        left = self.time_left_s()
        if left and self.done < self.total:
            parts.append(f"{_range(*left)} left")
        return ", ".join(parts)


def _range(least: float, most: float) -> str:
    low, high = in_words(least), in_words(most)
    return f"about {low}" if low == high else f"{low} to {high}"
