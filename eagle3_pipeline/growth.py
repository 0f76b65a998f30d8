"""Whether anything of a recipe was finished since a time: what a run that goes on would not make again.

Counted is what later runs build on: replies in a journal, parts of shards, tensors of checkpoints and of
captured states, downloaded bytes, manifests. Logs, news of progress and plans are written by a run that gets
nowhere as well.
"""

from pathlib import Path

from eagle3_pipeline.manifest import MANIFEST_NAME

_RESULTS = {".jsonl", ".safetensors", ".parquet", ".incomplete"}
_NO_RESULTS = {"logs", "progress"}


def grew_since(folder: Path, seconds: float) -> bool:
    """Whether a result below a recipe's folder was written after a time (seconds since the epoch)."""
    return any(
        _is_written_since(path, seconds)
        for of_asset in (folder.iterdir() if folder.is_dir() else ())
        if of_asset.name not in _NO_RESULTS
        for path in of_asset.rglob("*")
        if path.suffix in _RESULTS or path.name == MANIFEST_NAME
    )


def _is_written_since(path: Path, seconds: float) -> bool:
    try:
        return path.stat().st_mtime > seconds
    except FileNotFoundError:  # it is used up, or has its final name by now
        return False
