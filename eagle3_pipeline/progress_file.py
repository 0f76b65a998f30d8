"""How far a step is, as lines of JSON that another terminal reads."""

import json
from pathlib import Path
from typing import Any, Self


class ProgressFile:
    """The progress of one call of a step, a line per piece of news; a context manager."""

    def __init__(self, folder: Path, step: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{step}.jsonl").open("a", buffering=1, encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        """Append one line."""
        self._file.write(json.dumps(values) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
