"""How long a job may still take: tokens that are left over tokens per second, and the tail at its end."""

import math
from collections.abc import Sequence

from eagle3_pipeline.generation.lengths import Bounds, LengthCurve


def seconds_left(
    curve: LengthCurve, running: Sequence[int], waiting: int, rates: Bounds, reply_rate: float
) -> Bounds:
    """Between which two numbers of seconds the end is expected; not a confidence interval.

    `running` are the tokens so far of running requests, `waiting` is the number of those still to be sent,
    `rates` are the worse and the better of the tokens per second now and on the mean, `reply_rate` the tokens
    per second of one request. Tokens left are `waiting` means of the curve, and of each running request what
    such a one still makes. At the end the server is no longer full, and one long reply is waited for:

        low     tokens left / better rate, or the rest of the request that is to run longest
        high    tokens left / worse rate + one reply of the longest length seen, begun last

    The mean of those that wait is taken 2 / sqrt(replies) lower and higher: twice its standard error where
    lengths scatter by as much as their mean, as those of completions do.
    """
    doubt = 2 / math.sqrt(max(curve.replies, 4))
    rests = [curve.left(so_far) for so_far in running]
    low = waiting * curve.mean.low * (1 - doubt) + sum(rest.low for rest in rests)
    high = waiting * curve.mean.high * (1 + doubt) + sum(rest.high for rest in rests)
    youngest = 0 if waiting else min(running, default=0)
    tail_s = (curve.longest_seen - youngest) / reply_rate
    soonest = max(low / rates.high, max((rest.low for rest in rests), default=0.0) / reply_rate)
    return Bounds(soonest, max(soonest, high / rates.low + tail_s))
