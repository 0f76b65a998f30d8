"""The numbers of a collection at one moment: a line for people, JSON for a file, floats for a plot."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eagle3_pipeline.duration import in_words
from eagle3_pipeline.generation.lengths import Bounds
from eagle3_pipeline.samples.sample import REJECTED


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """What is done, how fast, what went wrong, how long it may take; of this call unless it is said."""

    total: int
    """Turns to be answered, with those of earlier calls."""
    before: int
    """Replies of earlier calls."""
    in_flight: int
    server_starts: bool
    """Whether a server is awaited."""
    verdicts: Mapping[str, int]
    """Replies by the verdict of their sample."""
    errors: Mapping[str, int]
    """Failed attempts by reason."""
    requests_per_second: float
    """Of the last minute."""
    tokens_per_second: float
    requests_per_second_mean: float
    """Since the first request, without the time in which none was at a server."""
    tokens_per_second_mean: float
    mean_length: float | None
    """Tokens of a reply, on the mean of those that are finished; too low while a job is young."""
    corrected_length: Bounds | None
    """The same, corrected for the requests that are still running."""
    seconds_left: Bounds | None

    @property
    def replies(self) -> int:
        """Replies of this call."""
        return sum(self.verdicts.values())

    @property
    def done(self) -> int:
        """Turns that have their reply."""
        return self.before + self.replies

    def percent(self, turns: int) -> int:
        """The whole percent of all turns that so many are."""
        return 100 * turns // max(self.total, 1)

    def share(self, *verdicts: str) -> float:
        """The share of this call's replies that have one of these verdicts."""
        return sum(self.verdicts.get(one, 0) for one in verdicts) / max(self.replies, 1)

    def line(self) -> str:
        """One line for people."""
        earlier = f" ({self.before:,} from before)" if self.before else ""
        parts = [f"{self.done:,}/{self.total:,} replies{earlier}"]
        if self.server_starts:
            parts.append("waiting for the server")
        parts.append(f"{self.in_flight:,} in flight")
        if self.requests_per_second_mean or self.tokens_per_second:
            parts.append(
                f"{self.requests_per_second:.1f} requests/s and {self.tokens_per_second:,.0f} tokens/s now "
                f"({self.requests_per_second_mean:.1f} and {self.tokens_per_second_mean:,.0f} mean)"
            )
        if self.mean_length is not None and self.corrected_length is not None:
            corrected = _range(*(f"{one:,.0f}" for one in _both(self.corrected_length)))
            parts.append(f"mean length {self.mean_length:,.0f} tokens (corrected {corrected})")
        if self.replies:
            parts.append(f"{self.share('truncated'):.1%} truncated, {self.share(*REJECTED):.1%} rejected")
        if self.errors:
            most_first = sorted(self.errors.items(), key=lambda one: -one[1])
            parts.append("errors: " + ", ".join(f"{count:,} x {reason}" for reason, count in most_first))
        if self.seconds_left is not None:
            parts.append(f"{_range(*(in_words(one) for one in _both(self.seconds_left)))} left")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """All numbers as JSON values, and the line."""
        return {"line": self.line(), "done": self.done, **asdict(self)}

    def numbers(self) -> dict[str, float]:
        """Those that are worth a plot."""
        found: dict[str, float | None] = {
            "done": self.done,
            "total": self.total,
            "in_flight": self.in_flight,
            "failed_attempts": sum(self.errors.values()),
            "truncated_share": self.share("truncated"),
            "rejected_share": self.share(*REJECTED),
            "requests_per_second": self.requests_per_second,
            "tokens_per_second": self.tokens_per_second,
            "mean_length": self.mean_length,
        }
        for name, bounds in (
            ("corrected_length", self.corrected_length),
            ("seconds_left", self.seconds_left),
        ):
            found |= {f"{name}_{end}": one for end, one in (asdict(bounds) if bounds else {}).items()}
        return {name: float(one) for name, one in found.items() if one is not None}


def _both(bounds: Bounds) -> tuple[float, float]:
    return bounds.low, bounds.high


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
