"""A folder with a model: is it one, is it whole, and what is its content, as one value.

files up to 64 MiB     whole: config, tokenizer, chat template, code, weight index
larger ones            name, size and 64 blocks of 4 KiB, evenly spread: the weights

Its weights are the files that its index names; without an index model.safetensors alone, where there is one,
and else every *.safetensors; of the top folder only.
"""

import fnmatch
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import sha256_of_file
from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.provenance import fingerprint

_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".py", ".safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WHOLE_BYTES = 64 * 2**20
_BLOCKS, _BLOCK_BYTES = 64, 4096
INDEX_NAME = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"


def weight_names(names: Collection[str], index: str | None) -> set[str]:
    """Those of a model's file names that are weights; raises ValueError where its `index` names none."""
    if index is not None:
        values = json.loads(index)
        found = values.get("weight_map") if isinstance(values, dict) else None
        if not isinstance(found, dict) or not found:
            raise ValueError("it has no weight_map")
        return {str(name) for name in found.values()}
    top = {name for name in names if fnmatch.fnmatch(name, "*.safetensors") and "/" not in name}
    return {ONE_FILE} if ONE_FILE in top else top


def weight_files(folder: Path) -> list[Path]:
    """The weights of the model in `folder`, by name; raises BadInput where its index cannot be read."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    try:
        index = (folder / INDEX_NAME).read_text() if INDEX_NAME in names else None
        found = weight_names(names, index)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{folder / INDEX_NAME} does not say where the weights are ({error}): download or copy the model "
            "again, whole."
        ) from error
    return sorted(folder / name for name in found)


def content_of_model(folder: Path, beside: tuple[str, ...] | None = None) -> str:
    """Fingerprint of what the model in `folder` is: the names, sizes and contents of its files.

    With `beside`, of its weights and of what these patterns name only: a folder of the hub's cache may hold
    more, that others fetched.

    Weights are sampled, because hashing 540 GB at each step would take an hour: whatever trains or
    merges a model changes every block, and no changed stretch of 1/64 of a file is missed, but a few
    values edited by hand may be. Modification times are left out on purpose: a folder that was copied,
    or downloaded again into an emptied cache, is the same model, and what was made from it stands.
    """
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES and path.is_file()]
    if beside is not None:
        weights = {path.name for path in weight_files(folder)} | {INDEX_NAME}
        files = [path for path in files if path.name in weights or _is_among(path.name, beside)]
    entries = []
    for path in files:
        status = path.stat()
        entries.append(
            [path.name, status.st_size, _checksum(path.absolute(), status.st_mtime_ns, status.st_size)]
        )
    return fingerprint(entries)


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json; raises BadInput where there is none, or none that can be read."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(f"{folder} is no model folder: it has no config.json. Check target in the recipe.")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise BadInput(f"{path} is no JSON ({error}): download or copy the model again.") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path} holds no mapping: it describes no model. Check target in the recipe.")
    return config


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model, which multimodal models such as Kimi-K2.5 nest."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) and part else config


def require_whole(folder: Path) -> dict[str, Any]:
    """The config of the model in `folder`; raises BadInput unless vLLM would find all that it loads there."""
    config = read_config(folder)
    if not config.get("architectures"):
        raise BadInput(
            f"{folder / 'config.json'} names no architectures, so vLLM cannot know what to load: "
            "take a whole model folder, not one of its parts or of an adapter."
        )
    if not any(folder.glob("*.safetensors")):
        names = [path.name for path in folder.iterdir()]
        raise BadInput(f"{folder} has no *.safetensors{pickles_among(names)}")
    if missing := _missing_weights(folder):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadInput(
            f"{folder} lacks weights: {', '.join(missing[:3])}{more}. Download or copy the model again, "
            "whole, and materialise target_model again."
        )
    return config


def pickles_among(names: Iterable[str]) -> str:
    """How "it has no *.safetensors" goes on: with the pickles that are there instead, and what to do."""
    if not (found := sorted(name for name in names if Path(name).suffix in _PICKLES)):
        return ". Take a whole model folder."
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (
        f", only pickles ({', '.join(found[:3])}{more}). They can run code when they are read, so they never "
        "are. If you trust their author, convert them once (torch.load, then safetensors.torch.save_file), "
        "and name the folder with path in the recipe."
    )


def is_whole(folder: Path) -> bool:
    """Whether config and weights are there. In a cache that was emptied, links lead nowhere."""
    try:
        weights = weight_files(folder)
    except BadInput:
        return False
    return bool(weights) and (folder / "config.json").is_file() and all(path.is_file() for path in weights)


def _missing_weights(folder: Path) -> list[str]:
    """Weight files that cannot be read; the index where it does not say which they are."""
    try:
        return [path.name for path in weight_files(folder) if not path.is_file()]
    except BadInput:
        return [INDEX_NAME]


def _is_among(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


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
