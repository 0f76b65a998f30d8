"""A folder with a model: is it one, is it whole, and what is its content, as one value.

files up to 64 MiB     whole: config, tokenizer, chat template, code, weight index
larger ones            name, size and 64 blocks of 4 KiB, evenly spread: the weights
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
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
    weights = any(folder.glob("*.safetensors"))
    return weights and (folder / "config.json").is_file() and not _missing_weights(folder)


def _missing_weights(folder: Path) -> list[str]:
    """Weight files that are listed, by the folder or by the index of the weights, and cannot be read."""
    names = {path.name for path in folder.glob("*.safetensors")}
    if (index := folder / INDEX_NAME).is_file():
        try:
            names |= {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return [INDEX_NAME]
    return sorted(name for name in names if not (folder / name).is_file())


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
