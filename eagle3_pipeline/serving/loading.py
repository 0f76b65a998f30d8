"""How long servers took to load, by their logs, which stay when a server is gone.

    evaluation-20261130T200438-e1ce4e.log                           in its name, when it was started
        (APIServer pid=1) INFO 11-30 20:05:02 [entry.py:140] Starting vLLM server on http://...

A server that never came up has no such line.
"""

import re
from datetime import datetime
from pathlib import Path

# The nearest to the server that is asked about comes first.
_PHASES = ("evaluation", "generation", "extraction")
_UP = re.compile(rb"INFO (\d\d-\d\d \d\d:\d\d:\d\d) .*Starting vLLM (API )?server")


def seconds_to_load(logs: Path) -> float | None:
    """Those of the last evaluation server whose log lies in `logs`, else of another phase's; None without."""
    for phase in _PHASES:
        # The time in the name sorts them.
        for log in sorted(logs.glob(f"{phase}-*.log"), reverse=True):
            if (seconds := _seconds(log)) is not None:
                return seconds
    return None


def _seconds(log: Path) -> float | None:
    """None for a server that never came up, and for another log."""
    try:
        started = datetime.strptime(log.name.split("-")[1], "%Y%m%dT%H%M%S")
        with log.open("rb") as lines:
            up = next((found[1].decode() for line in lines if (found := _UP.search(line))), None)
        if up is None:
            return None
        ready = datetime.strptime(f"{started.year}-{up}", "%Y-%m-%d %H:%M:%S")
    except (OSError, ValueError):
        return None
    if ready < started:  # over New Year: vLLM's lines have no year
        ready = ready.replace(year=started.year + 1)
    return (ready - started).total_seconds()
