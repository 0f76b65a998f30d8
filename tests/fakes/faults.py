"""What can be made to go wrong: settings from FAKE_* variables, overridden at any time by a control file.

tests/fakes/server.py lists and explains them. The control file (path in FAKE_CONTROL) is a JSON object with
the lower-case names; it is read again whenever it changes, so a test turns a fault on and off in a running
server. Write it with `write_control`, atomically.
"""

import hashlib
import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Faults:
    """Every setting with its harmless default."""

    # start
    crash_log: str = ""
    crash_exit: int = 1
    load_seconds: float = 0.0
    children: int = 0
    # life
    die_after_requests: int = -1
    die_signal: str = ""
    engine_dies_after_requests: int = -1
    ignore_sigterm: bool = False
    hang_after_requests: int = -1
    # refusals
    busy_requests: int = 0
    busy_status: int = 503
    retry_after: str = "1"
    refuse_marker: str = ""
    # answers
    mean_tokens: int = 24
    long_tail: bool = False
    truncated_share: float = 0.0
    degenerate_share: float = 0.0
    empty_share: float = 0.0
    no_reasoning: bool = False
    first_token_seconds: float = 0.0
    seconds_per_token: float = 0.0
    acceptance: float = 0.5
    knee: int = 0
    cache_requests: int = 0
    # hidden states
    torn_share: float = 0.0
    nan_share: float = 0.0
    short_share: float = 0.0
    shifted_share: float = 0.0
    wrong_ids_share: float = 0.0
    late_states_seconds: float = 0.0
    no_states_share: float = 0.0
    no_room_after: int = -1


def strikes(share: float, kind: str, token_ids: list[int]) -> bool:
    """Whether a fault of this share hits these ids: the same ones in every process, another set per kind."""
    digest = hashlib.sha256(f"{kind}{token_ids}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < share


def write_control(path: Path, **settings: Any) -> None:
    """Set the control file; raises TypeError on a name that does not exist."""
    Faults(**settings)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(settings))
    temporary.replace(path)


class FaultSettings:
    """The settings of a running stand-in; `now()` is what holds at this moment."""

    def __init__(self) -> None:
        self._base = _from_environment()
        control = os.environ.get("FAKE_CONTROL")
        self._control = Path(control) if control else None
        self._stamp: tuple[int, int] | None = None
        self._current = self._base

    def now(self) -> Faults:
        """The settings at this moment."""
        if self._control is None or not self._control.exists():
            return self._base
        found = self._control.stat()
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp != self._stamp:
            self._current = replace(self._base, **json.loads(self._control.read_text()))
            self._stamp = stamp
        return self._current


def _from_environment() -> Faults:
    found: dict[str, Any] = {}
    for field in fields(Faults):
        text = os.environ.get(f"FAKE_{field.name.upper()}")
        if text is None:
            continue
        kind: Any = type(field.default)
        found[field.name] = text.lower() in ("1", "true", "yes") if kind is bool else kind(text)
    return Faults(**found)
