"""Finds how many requests keep a server busiest, from nothing but readings of its metrics.

Throughput over the limit has one top: a server that is given more works faster until its compute is full,
and may be slower when it is given too much. The climb doubles while throughput grows, then goes on in both
directions with smaller steps, and keeps a step only if it brought more than noise. A queue that stands,
preemptions and a full KV cache lower the limit, as soon as a change has taken effect. Settled, it tries its
neighbours now and then, because the load changes: long replies pile up over hours.

Pure: readings go in, a limit comes out. A reading teaches only while exactly `limit` requests are in use:
neither a job's beginning and end nor the time in which a lowered limit takes effect.
"""

import math
from typing import TYPE_CHECKING

from eagle3_pipeline.generation.level import Level, Spread

if TYPE_CHECKING:
    from eagle3_pipeline.generation.concurrency import Reading

START = 32
"""Limit at the beginning: enough for any server to show its speed, too few to hurt one."""

# Steps as powers of two: x 2 in the ramp, then x 1.41, then x 1.19.
_RAMP, _STRIDE, _PROBE = 1.0, 0.5, 0.25
# A doubling that brought less than this power of itself (x 1.5) is near the top, or beyond it.
_STEEP = 0.6
_GAIN = 1.01
# A rate is of so many seconds and tokens at least, so that new prompts and the length of a step blur it
# less. A slow server has 30 s for it.
_LEAST_S, _LEAST_TOKENS, _LONGEST_S = 3.0, 200, 30.0
_CLEAR = 1.5  # gain in the ramp that no noise makes
# After a raise the server works on the new prompts and makes few tokens, until about all requests run.
_TAKEN_IN, _LONGEST_INTAKE = 0.9, 15
# Rates that a limit must have before a small step from it is tried, and that a trial has at most.
_FEWEST, _MOST_TRIED = 3, 6
_APART = 1.04  # limits nearer than this are the same
_SURE = 1.6  # standard errors
_REST_S, _LONGEST_REST_S = 45.0, 180.0
_FULL_CACHE, _ROOMY_CACHE = 0.95, 0.93
_CEILING_S = 120.0
# A queue counts when more than this share of those that run waits, for so many readings on end. Requests
# that come while the server makes a step wait for its end, and after a raise it takes them in by and by.
_QUEUE_SHARE, _QUEUED_READINGS = 1 / 8, 5


class Climb:
    """The limit of one server's life. `most` bounds it."""

    def __init__(self, most: int) -> None:
        self.limit = min(START, most)
        self._most = most
        self._best = Level(self.limit)
        self._trial: Level | None = None
        self._step, self._upwards = _RAMP, True
        self._below: Level | None = None
        self._above: Level | None = None
        self._rest_s, self._rest_until = _REST_S, 0.0
        self._ceiling, self._ceiling_until = most, 0.0
        self._spread = Spread()
        self._last: Reading | None = None
        self._intake = _LONGEST_INTAKE  # readings that it may still take
        self._queued: list[int] = []  # running requests of each reading since there is a queue
        self._tokens = self._seconds = 0.0

    @property
    def rests(self) -> bool:
        """Whether it is settled for now, so that readings may be fewer."""
        return self._last is not None and self._last.at < self._rest_until

    def look(self, reading: "Reading", in_use: int) -> int:
        """Take a reading, with the requests that are out at that moment; returns the limit from now on."""
        last, self._last = self._last, reading
        if in_use != self.limit or last is None:
            self._settle()
        elif self._intake > 0:
            # The last of these readings shows the change itself.
            is_taken_in = reading.running >= _TAKEN_IN * self.limit and reading.waiting == 0
            self._intake = 0 if is_taken_in else self._intake - 1
        else:
            self._queued = [*self._queued, reading.running] if _queues(reading) else []
            lower = self._relief(reading)
            if lower < self.limit:
                self._give_way(lower, reading)
            elif not self._queued and (rate := self._rate(reading, reading.at - last.at)) is not None:
                self._learn(rate, reading)
        return self.limit

    def _relief(self, reading: "Reading") -> int:
        """The limit that relieves the server of what its metrics show; the present one if that is nothing."""
        running = min(self.limit, max(reading.running, 1))
        limit = self.limit
        if reading.preemptions > 0:
            limit = min(limit, running * 4 // 5)
        if reading.kv_cache_usage >= _FULL_CACHE:
            limit = min(limit, int(running * _ROOMY_CACHE / reading.kv_cache_usage))
        if len(self._queued) >= _QUEUED_READINGS:
            # Those that wait take the place of one that ends at once; more would only wait longer.
            most_running = max(self._queued)
            limit = min(limit, most_running + max(1, most_running // 16))
        return max(1, limit)

    def _give_way(self, lower: int, reading: "Reading") -> None:
        self._ceiling = max(lower, min(self.limit, reading.running) * 19 // 20)
        self._ceiling_until = reading.at + _CEILING_S
        self._step = min(self._step, _STRIDE)
        if self._trial is not None and lower > self._best.limit:
            self._try(lower)  # what is left of the trial is still a raise
        else:
            self._trial, self._best = None, Level(lower)
            self._below, self._above, self._upwards = None, None, False
            self._go(lower)

    def _rate(self, reading: "Reading", seconds: float) -> float | None:
        """Tokens per second over as many readings as it takes, or None until there are enough."""
        self._tokens += reading.tokens_per_second * seconds
        self._seconds += seconds
        rate = self._tokens / self._seconds
        is_clear = self._step == _RAMP and rate > _CLEAR * self._best.mean
        is_long = self._seconds >= _LEAST_S or is_clear
        if not (self._tokens >= _LEAST_TOKENS and is_long) and self._seconds < _LONGEST_S:
            return None
        self._tokens = self._seconds = 0.0
        return rate

    def _learn(self, rate: float, reading: "Reading") -> None:
        level = self._best if self._trial is None or self.limit == self._best.limit else self._trial
        level.rates.append(rate)
        self._spread.add(level)
        if self._trial is not None:
            self._judge(self._trial, self._best)
        if self._trial is None and reading.at >= self._rest_until and self._is_known(self._best):
            self._search(reading)

    def _is_known(self, level: "Level") -> bool:
        return len(level.rates) >= (_FEWEST if self._step <= _PROBE else 1)

    def _judge(self, trial: "Level", best: "Level") -> None:
        """Keep the trial, or take it back, or wait for more rates."""
        gain = trial.mean / best.mean if best.mean > 0 else math.inf
        doubt = _SURE * self._spread.error_of(trial, best)
        enough = len(trial.rates) >= _MOST_TRIED and len(best.rates) >= _FEWEST
        if gain * (1 - doubt) > _GAIN or (enough and gain > _GAIN):
            self._best, self._trial, self._rest_s = trial, None, _REST_S
            self._remember_worse(best)
            is_steep = math.log(gain) > _STEEP * abs(math.log(trial.limit / best.limit))
            if self._step == _RAMP and not is_steep:
                self._step = _STRIDE
                self._upwards = False
        elif gain * (1 + doubt) < _GAIN or enough:
            self._trial = None
            self._remember_worse(trial)
            if gain * (1 + doubt) > 1 / _GAIN and self._step > _PROBE:
                self._step /= 2  # as good: the top is between the two, or all is flat
            else:
                self._upwards = trial.limit < best.limit
                self._step = min(self._step, _STRIDE)
        elif self.limit == trial.limit and len(trial.rates) >= max(_FEWEST, 2 * len(best.rates)):
            self._go(best.limit)  # they are close, and the best is known less well than the trial
        elif self.limit == best.limit and len(best.rates) >= len(trial.rates):
            self._go(trial.limit)
        if self._trial is None and not self._is_known(self._best):
            self._go(self._best.limit)

    def _remember_worse(self, level: "Level") -> None:
        """The top lies between the nearest limits that were worse."""
        if level.limit < self._best.limit:
            self._below = level
        else:
            self._above = level

    def _search(self, reading: "Reading") -> None:
        """Try the next limit, or rest when there is none left to try."""
        while self._step >= _PROBE:
            for upwards in (self._upwards, not self._upwards):
                limit = self._neighbour(upwards, reading)
                if limit is not None:
                    self._try(limit)
                    return
            self._step /= 2
        self._rest_until = reading.at + self._rest_s
        self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        if (top := self._top()) != self._best.limit:
            self._best = Level(top)
        self._step, self._upwards = _PROBE, True
        self._below = self._above = None
        self._go(self._best.limit)

    def _top(self) -> int:
        """Where a parabola through the best rate and its two neighbours has its top: finer than any step."""
        below, best, above = self._below, self._best, self._above
        if below is None or above is None or min(below.mean, above.mean) <= 0:
            return best.limit
        left, right = math.log(best.limit / below.limit), math.log(above.limit / best.limit)
        rise, fall = math.log(best.mean / below.mean) / left, math.log(best.mean / above.mean) / right
        if rise + fall <= 0:
            return best.limit
        shift = (rise * right - fall * left) / (rise + fall) / 2
        return round(best.limit * math.exp(min(right / 2, max(-left / 2, shift))))

    def _neighbour(self, upwards: bool, reading: "Reading") -> int | None:
        """The limit one step away, or None where it must not or need not be tried."""
        here = self._best.limit
        if not upwards:
            limit = min(here - 1, round(here / 2**self._step))
            near = self._below is not None and limit <= self._below.limit * _APART
            return None if near or limit < 1 else limit
        most = float(self._ceiling if reading.at < self._ceiling_until else self._most)
        if reading.kv_cache_usage > 0:
            most = min(most, reading.running * _ROOMY_CACHE / reading.kv_cache_usage)
        limit = int(min(most, max(here + 1, round(here * 2**self._step))))
        near = self._above is not None and limit * _APART >= self._above.limit
        return None if near or limit <= here or _queues(reading) else limit

    def _try(self, limit: int) -> None:
        self._trial = Level(limit)
        self._go(limit)

    def _go(self, limit: int) -> None:
        if limit != self.limit:
            self.limit = limit
            self._settle()

    def _settle(self) -> None:
        self._intake = _LONGEST_INTAKE
        self._queued = []
        self._tokens = self._seconds = 0.0


def _queues(reading: "Reading") -> bool:
    return reading.waiting > max(1, reading.running * _QUEUE_SHARE)
