"""What a stand-in saw: its events, and what follows from them alone."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generation.stand_in import ASKED, EVENT


def read_events(path: Path) -> Any:
    """The events so far, in order, as numpy records; none where the file is not there yet."""
    return np.fromfile(path, dtype=EVENT) if path.exists() else np.empty(0, dtype=EVENT)


def answered(events: Any) -> Counter[int]:
    """Number of a prompt -> replies that were sent."""
    return Counter(events["number"][events["tokens"] > 0].tolist())


def asked(events: Any) -> Counter[int]:
    """Number of a prompt -> times that it was asked."""
    return Counter(events["number"][events["tokens"] == ASKED].tolist())


def moment(events: Any, share: float) -> float:
    """When this share of all replies was sent, on the monotonic clock."""
    replies = events["time"][events["tokens"] > 0]
    return float(replies[min(len(replies) - 1, int(share * len(replies)))])


def busy_share(events: Any, slots: int) -> float:
    """Share of the slots that had a request, from the first one until only `slots` replies are missing."""
    replies = events["time"][events["tokens"] > 0]
    first, last = events["time"][0], replies[max(0, len(replies) - slots - 1)]
    begins = np.minimum(events["time"][events["tokens"] == ASKED], last)
    ends = np.minimum(events["time"][events["tokens"] != ASKED], last)
    worked = ends.sum() - begins.sum() + (len(begins) - len(ends)) * last
    return float(worked / (slots * (last - first)))
