"""What was measured, kept as soon as it is whole: a kill redoes only what it was at.

    measurements.jsonl
        {"journal": 1, "fingerprint": ...}                              the report's
        {"host": ..., "server": ..., "set": ..., "temperature": ..., "in_flight": ..., "repeat": ...,
         "found": ...}
        {"host": ..., "server": ..., "what": ..., "found": ...}

All but `found` is the key. Speeds of one report are of one machine, and a server that was made again is
another one, so what was measured on another machine, or of another server, is not found.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.journal import Journal

_T = TypeVar("_T")

Key = dict[str, Any]
"""JSON values that say what was measured, and where."""


class Kept:
    """The journal of one report; held by one process at a time."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Open or create it; raises DamagedFile, and Busy where another process measures this report."""
        self._journal = Journal(path, fingerprint, slim=_key_of)
        keys = map(_text, self._journal.records)
        self._offsets = dict(zip(keys, self._journal.offsets, strict=True))

    def find(self, key: Key, of: Callable[[dict[str, Any]], _T]) -> _T | None:
        """What was kept under `key`, or None; raises DamagedFile where `of` cannot read it."""
        if (offset := self._offsets.get(_text(key))) is None:
            return None
        try:
            return of(self._journal.read(offset)["found"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(
                f"{self._journal.path} holds something else than a measurement of {key} ({error!r}). Move "
                "the file away to measure again."
            ) from error

    def keep(self, key: Key, found: dict[str, Any]) -> None:
        """Keep `found`, JSON values; it is on the disk when this returns."""
        (self._offsets[_text(key)],) = self._journal.append([{**key, "found": found}])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()


def _key_of(record: dict[str, Any]) -> Key:
    return {name: value for name, value in record.items() if name != "found"}


def _text(key: Key) -> str:
    return json.dumps(key, sort_keys=True)
