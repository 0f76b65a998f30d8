"""How long completions are, while the long ones are still running: the product-limit estimate.

Short replies finish first, so the mean of the finished ones is too low for as long as a job is young. With
running requests as censored observations (all that is known of one is that it is longer than its tokens so
far) the curve of Kaplan and Meier (Nonparametric Estimation from Incomplete Observations, JASA 53, 1958) is
not misled::

    S(t) = product over the lengths t_i <= t of (1 - d_i / n_i)       the share that is longer than t tokens
        d_i    replies of exactly t_i tokens
        n_i    replies and running requests of t_i tokens or more
    mean = integral of S(t) from 0 to `longest`, in tokens

At the longest length seen the curve has come down to 0 if that length is a reply's. If a running request is
the longest, what is beyond it is not known, and there is a bound instead of a number: `low` ends the integral
there, `high` lets S keep its last value up to the token limit.

It ends, too, where fewer are at risk than a tenth of the requests that are cut off. A job begins with all its
requests at once, and they reach one length together. Their tokens so far are an estimate, so that a few quick
ones end beyond it, where nobody else is at risk: each would take it down by a large step, in the end to 0.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_LEAST_SHARE_AT_RISK = 0.1


@dataclass(frozen=True)
class Bounds:
    """A number between two, which are the same where it is known."""

    low: float
    high: float


class LengthCurve:
    """S(t) of completion lengths in tokens, from those that are finished and those that are cut off."""

    def __init__(self, finished: Mapping[int, int], cut_off: Iterable[int], longest: int) -> None:
        """`finished` counts replies by length, `cut_off` holds tokens so far, `longest` is the token limit.

        A reply that ran into the limit is a reply of that length: it is what it costs. Nothing seen at
        all: between 0 and `longest`.
        """
        unfinished = Counter(cut_off)
        self.replies = sum(finished.values())
        at_risk = self.replies + unfinished.total()
        enough = unfinished.total() * _LEAST_SHARE_AT_RISK
        # Row k: at lengths[k] tokens, S just after it and the area up to it.
        self._lengths, self._shares, self._areas = [0], [1.0], [0.0]
        share = 1.0
        for length in sorted(finished.keys() | unfinished.keys()):
            if at_risk < enough:
                break
            area = self._areas[-1] + share * (length - self._lengths[-1])
            ended = finished.get(length, 0)
            share *= 1 - ended / at_risk
            at_risk -= ended + unfinished[length]
            self._lengths.append(length)
            self._shares.append(share)
            self._areas.append(area)
        self.longest_seen = max([0, *finished, *unfinished])
        self._longest = longest
        self._unseen = share * max(0, longest - self._lengths[-1])

    @property
    def mean(self) -> Bounds:
        """The mean completion length."""
        return Bounds(self._areas[-1], self._areas[-1] + self._unseen)

    def left(self, so_far: int) -> Bounds:
        """The mean of the tokens that a running request, one of `cut_off`, still makes."""
        row = bisect_right(self._lengths, so_far) - 1
        share = self._shares[row]
        if so_far > self._lengths[-1] or share == 0:
            return Bounds(0.0, max(0, self._longest - so_far))
        area = self._areas[-1] - self._areas[row] - share * (so_far - self._lengths[row])
        return Bounds(area / share, (area + self._unseen) / share)
