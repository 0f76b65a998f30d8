"""The pulse of a collection: what is done, how fast, what went wrong, and how long it may take.

Events go in, from the job's thread, with the clock that it was given; numbers come out, in any thread.

All rates are by a clock that stands still while no request is at a server: the minutes that a server takes
to start, first or again, are in none of them.

The tokens so far of a running request are its seconds times the tokens per second of a request, which the
last 256 replies tell (the sum of their tokens over the sum of their seconds). Streaming would count them, at
a price: vLLM's reasoning parsers split thoughts from answer wrongly where the chunks of a stream are coarse,
and a reply in one piece is parsed whole. Pauses between the attempts of a request count as if it ran.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from eagle3_pipeline.generation.concurrency import Reading
from eagle3_pipeline.generation.lengths import Bounds, LengthCurve
from eagle3_pipeline.generation.time_left import seconds_left
from eagle3_pipeline.generation.vitals import Vitals
from eagle3_pipeline.samples.sample import Sample

_WINDOW_S = 60.0
# A reading of the server's metrics older than this is not "now".
_FRESH_S = 15.0
_RECENT_REPLIES = 256
# Before so many replies a rate says nothing, and no time left is given.
_LEAST_REPLIES = 8


class Pulse:
    """Counts of one call of a collection. `total` and `before` are turns, `before` those of earlier calls.

    Lengths are learned from this call's requests alone: of those that an earlier call lost at its kill
    nothing is known. A request that came back without a reply (given up, or cut by its server's death) stays
    in the estimate as longer than its tokens so far, and asked again it is another one: leaving it out would
    prefer the short. A refused one made no tokens and is left out.
    """

    def __init__(
        self, total: int, before: int, longest: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`longest` is the most tokens that a completion can have."""
        self.total = total
        self.before = before
        self._longest = longest
        self._clock = clock
        self._lock = threading.Lock()
        self._busy_s = 0.0  # seconds with a request at a server, up to the last time that there was none
        self._busy_since = 0.0
        self._starts = False
        # By that clock: when each running request was sent, and how long those ran that have no reply.
        self._sent: dict[str, float] = {}
        self._unanswered: dict[str, float] = {}
        self._cut_off: list[float] = []
        self._lengths: Counter[int] = Counter()
        self._tokens = 0
        self._verdicts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._last_minute: deque[tuple[float, int]] = deque()  # when, tokens
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT_REPLIES)  # tokens, seconds
        self._readings: deque[tuple[float, float, float]] = (
            deque()
        )  # by the given clock: when, tokens, seconds
        self._read_at: float | None = None

    def server_starts(self) -> None:
        """A server is awaited, until the next request is sent."""
        with self._lock:
            self._starts = True
            self._readings.clear()
            self._read_at = None

    def sent(self, name: str) -> None:
        """A request is on its way."""
        with self._lock:
            self._starts = False
            if not self._sent:
                self._busy_since = self._clock()
            if name in self._unanswered:
                self._cut_off.append(self._unanswered.pop(name))
            self._sent[name] = self._now()

    def returned(self, name: str) -> None:
        """A request came back, whatever came of it; if it is a reply, `replied` follows."""
        with self._lock:
            now = self._now()
            self._unanswered[name] = now - self._sent.pop(name)
            if not self._sent:
                self._busy_s = now

    def replied(self, sample: Sample) -> None:
        """A turn is done."""
        tokens = min(len(sample.completion_token_ids), self._longest)
        with self._lock:
            seconds = self._unanswered.pop(sample.sample_id)
            self._verdicts[sample.verdict] += 1
            self._last_minute.append((self._now(), tokens))
            if sample.verdict == "refused":
                return
            self._tokens += tokens
            self._lengths[tokens] += 1
            self._recent.append((tokens, seconds))

    def failed(self, reason: str) -> None:
        """An attempt failed; the turn stays to be done."""
        with self._lock:
            self._errors[reason] += 1

    def dropped(self, turns: int) -> None:
        """So many turns will not be asked, because their conversation ended early."""
        with self._lock:
            self.total -= turns

    def measured(self, reading: Reading) -> None:
        """The server's metrics were read."""
        with self._lock:
            if self._read_at is not None:
                seconds = reading.at - self._read_at
                self._readings.append((self._clock(), reading.tokens_per_second * seconds, seconds))
            self._read_at = reading.at

    @property
    def done(self) -> int:
        """Turns that have their reply."""
        return self.before + self._verdicts.total()

    def vitals(self) -> Vitals:
        """All numbers now."""
        with self._lock:
            return self._vitals()

    def _now(self) -> float:
        """Seconds so far in which a request was at a server."""
        return self._busy_s + (self._clock() - self._busy_since if self._sent else 0.0)

    def _vitals(self) -> Vitals:
        now = self._now()
        replies = self._verdicts.total()
        tokens = sum(one for one, _ in self._recent)
        seconds = sum(one for _, one in self._recent)
        reply_rate = tokens / seconds if seconds > 0 else 0.0
        running = self._tokens_so_far((now - at for at in self._sent.values()), reply_rate)
        requests_now, tokens_now = self._rates_now(now)
        tokens_mean = (self._tokens + sum(running)) / now if now > 0 else 0.0
        curve = left = None
        if self._lengths:
            cut_off = self._tokens_so_far([*self._unanswered.values(), *self._cut_off], reply_rate)
            curve = LengthCurve(self._lengths, running + cut_off, self._longest)
            rates = [one for one in (tokens_now, tokens_mean) if one > 0]
            if rates and reply_rate > 0 and replies >= _LEAST_REPLIES and self.done < self.total:
                waiting = max(0, self.total - self.done - len(running))
                left = seconds_left(curve, running, waiting, Bounds(min(rates), max(rates)), reply_rate)
        return Vitals(
            total=self.total,
            before=self.before,
            in_flight=len(running),
            server_starts=self._starts,
            verdicts=dict(self._verdicts),
            errors=dict(self._errors),
            requests_per_second=requests_now,
            tokens_per_second=tokens_now,
            requests_per_second_mean=replies / now if now > 0 else 0.0,
            tokens_per_second_mean=tokens_mean,
            mean_length=self._tokens / self._lengths.total() if self._lengths else None,
            corrected_length=curve.mean if curve else None,
            seconds_left=left,
        )

    def _rates_now(self, now: float) -> tuple[float, float]:
        """Requests and tokens per second; tokens as the server counts them, where it was asked just now."""
        while self._last_minute and self._last_minute[0][0] < now - _WINDOW_S:
            self._last_minute.popleft()
        window = min(_WINDOW_S, now)
        if window <= 0:
            return 0.0, 0.0
        requests = len(self._last_minute) / window
        while self._readings and self._readings[0][0] < self._clock() - _WINDOW_S:
            self._readings.popleft()
        if self._readings and self._clock() - self._readings[-1][0] < _FRESH_S:
            seconds = sum(one for _, _, one in self._readings)
            return requests, sum(tokens for _, tokens, _ in self._readings) / seconds
        return requests, sum(tokens for _, tokens in self._last_minute) / window

    def _tokens_so_far(self, seconds: Iterable[float], reply_rate: float) -> list[int]:
        return [min(int(one * reply_rate), self._longest) for one in seconds]
