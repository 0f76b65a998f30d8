"""The content of a model folder as one value, for a folder that lies anywhere and has any size.

files up to 64 MiB     whole: config, tokenizer, chat template, code, weight index
larger ones            name, size and 64 blocks of 4 KiB, evenly spread: the weights
"""

import hashlib
from functools import cache
from pathlib import Path

from eagle3_pipeline.durable_files import sha256_of_file
from eagle3_pipeline.provenance import fingerprint

_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".py", ".safetensors")
_WHOLE_BYTES = 64 * 2**20
_BLOCKS, _BLOCK_BYTES = 64, 4096


def content_of_model(folder: Path) -> str:
    """Fingerprint of what the model in `folder` is: the names, sizes and contents of its files.

    Weights are sampled, because hashing 540 GB at each step would take an hour: whatever trains or
    merges a model changes every block, and no changed stretch of 1/64 of a file is missed, but a few
    values edited by hand may be. Modification times are left out on purpose: a folder that was copied,
    or downloaded again into an emptied cache, is the same model, and what was made from it stands.
    """
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES and path.is_file()]
    entries = []
    for path in files:
        status = path.stat()
        entries.append(
            [path.name, status.st_size, _checksum(path.absolute(), status.st_mtime_ns, status.st_size)]
        )
    return fingerprint(entries)


def is_whole(folder: Path) -> bool:
    """Whether config and weights are there. In a cache that was emptied, links lead nowhere."""
    weights = list(folder.glob("*.safetensors"))
    return bool(weights) and all(path.is_file() for path in (folder / "config.json", *weights))


@cache
def _checksum(path: Path, _mtime_ns: int, size: int) -> str:
    """One reading per state of a file: places are computed for each shard."""
    if size <= _WHOLE_BYTES:
        return sha256_of_file(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in range(_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
