"""Lengths of completions in tokens: their histogram and their percentiles."""

from collections.abc import Sequence

_BINS = 32
_PERCENTILES = {"p10": 10, "p50": 50, "p90": 90}


def histogram(lengths: Sequence[int]) -> dict[str, list[int]]:
    """Counts of lengths in up to 32 equal bins: bin k holds edges[k] <= length < edges[k + 1]."""
    longest = max(lengths, default=0)
    width = longest // _BINS + 1
    counts = [0] * (longest // width + 1)
    for length in lengths:
        counts[length // width] += 1
    return {"edges": [width * number for number in range(len(counts) + 1)], "counts": counts}


def percentiles(lengths: Sequence[int]) -> dict[str, int]:
    """p10, p50 and p90: the shortest length that so many percent of the completions do not exceed."""
    import numpy  # here, because the code location imports this file when it loads

    values = numpy.percentile(lengths or [0], list(_PERCENTILES.values()), method="inverted_cdf")
    return {name: int(value) for name, value in zip(_PERCENTILES, values, strict=True)}
