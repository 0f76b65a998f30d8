"""How fast a server is at one number of requests in flight, and how sure that is: rates and their spread."""

import math
from collections import deque

_RATES_KEPT = 8
# Spread of rates before any are seen, in shares, with the weight of so many of them; and how fast it forgets.
_SPREAD, _SPREAD_WEIGHT, _FORGET = 0.06, 4.0, 0.98


class Level:
    """The newest rates at one limit, in tokens per second."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rates: deque[float] = deque(maxlen=_RATES_KEPT)

    @property
    def mean(self) -> float:
        """Of the rates; 0 while there is none."""
        return sum(self.rates) / len(self.rates) if self.rates else 0.0


class Spread:
    """How much rates at one limit differ by chance, in shares of their mean."""

    def __init__(self) -> None:
        self._weight = _SPREAD_WEIGHT
        self._squares = _SPREAD_WEIGHT * _SPREAD**2

    def add(self, level: Level) -> None:
        """Take the newest rate of a level, against those before it."""
        *before, newest = level.rates
        if before and (mean := sum(before) / len(before)) > 0:
            # Against a mean of few, a difference is larger by chance.
            share = (newest / mean - 1) ** 2 * len(before) / (len(before) + 1)
            self._weight = self._weight * _FORGET + 1
            self._squares = self._squares * _FORGET + share

    def error_of(self, one: Level, other: Level) -> float:
        """The standard error of the ratio of two means."""
        return math.sqrt(self._squares / self._weight * (1 / len(one.rates) + 1 / len(other.rates)))
