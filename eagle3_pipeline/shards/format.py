"""One part of a hidden-state shard: an ordinary safetensors file with this content.

    offsets       [samples + 1]             int64   sample i has the rows offsets[i] .. offsets[i + 1]
    hidden_states [tokens, layers, hidden]  bf16    id k of `layer_ids`: see extraction/layers.py
    token_ids     [tokens]                  int64   prompt + completion of each sample, as the server had them
    loss_mask     [tokens]                  bool    false on the prompt, true on the completion

Header metadata (strings, as safetensors wants them): `format`, `format_version`, `layer_ids` (JSON),
`layer_convention`, `pre_norm_last`, `dtype`, `sample_ids` (JSON), `model_fingerprint`.

The header is read and written here without torch. safetensors' own writer wants one contiguous
tensor per name, which would double the memory of a part, and hides the number of an OSError.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.extraction.layers import CONVENTION

FORMAT = "eagle3-hidden-states"
FORMAT_VERSION = "1"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the bound of safetensors itself
_FIXED_HEADER_BYTES = 2048  # bound for all of the header except sample ids and layer ids
_DTYPES = {
    "offsets": ("I64", 8),
    "hidden_states": ("BF16", 2),
    "token_ids": ("I64", 8),
    "loss_mask": ("BOOL", 1),
}


def bytes_of_states(tokens: int, layers: int, hidden_size: int) -> int:
    """Bytes of the states alone: tokens x layers x hidden size x 2 (bfloat16)."""
    return tokens * layers * hidden_size * _DTYPES["hidden_states"][1]


@dataclass(frozen=True)
class ShardLayout:
    """What all samples of a shard have in common."""

    layer_ids: tuple[int, ...]
    hidden_size: int
    model_fingerprint: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a part per token: states, token id and mask."""
        return bytes_of_states(1, len(self.layer_ids), self.hidden_size) + 8 + 1


@dataclass(frozen=True)
class PartHeader:
    """What the header of one part says; `data_start` and `file_bytes` follow from it."""

    layout: ShardLayout
    sample_ids: tuple[str, ...]
    tokens: int
    tensors: dict[str, tuple[int, int]]  # name -> first and last + 1 byte within the data
    data_start: int

    @property
    def file_bytes(self) -> int:
        """Size that the whole file must have."""
        return self.data_start + max(end for _, end in self.tensors.values())


def bytes_of_sample(sample_id: str, tokens: int, layout: ShardLayout) -> int:
    """Upper bound of the bytes that one more sample adds to a part."""
    in_header = len(json.dumps(json.dumps(sample_id))) + 4
    return tokens * layout.bytes_per_token + 8 + in_header


def bytes_of_empty_part(layout: ShardLayout) -> int:
    """Upper bound of the bytes of a part besides its samples."""
    return _LENGTH_BYTES + _FIXED_HEADER_BYTES + len(json.dumps(layout.layer_ids)) + 8


def encode_header(layout: ShardLayout, sample_ids: tuple[str, ...], tokens: int) -> bytes:
    """The bytes before the data of a part; the data follow in the order of the table above."""
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "layer_ids": json.dumps(list(layout.layer_ids)),
            "layer_convention": CONVENTION,
            "pre_norm_last": "true",
            "dtype": "bfloat16",
            "sample_ids": json.dumps(list(sample_ids)),
            "model_fingerprint": layout.model_fingerprint,
        }
    }
    start = 0
    for name, shape in _shapes(layout, len(sample_ids), tokens).items():
        dtype, size = _DTYPES[name]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> PartHeader:
    """The header of a part, checked against its own size and this format; raises DamagedFile."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        parsed = _parse(header, _LENGTH_BYTES + length)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise DamagedFile(
            f"{path} is not a part of a hidden-state shard ({error}). Delete its shard's folder and "
            "materialise hidden_state_shards again."
        ) from error
    size = path.stat().st_size
    if size != parsed.file_bytes:
        raise DamagedFile(
            f"{path}: {size} bytes, its header speaks of {parsed.file_bytes}. The file was cut or added "
            "to. Delete its shard's folder and materialise hidden_state_shards again."
        )
    return parsed


def _shapes(layout: ShardLayout, samples: int, tokens: int) -> dict[str, list[int]]:
    return {
        "offsets": [samples + 1],
        "hidden_states": [tokens, len(layout.layer_ids), layout.hidden_size],
        "token_ids": [tokens],
        "loss_mask": [tokens],
    }


def _parse(header: dict[str, Any], data_start: int) -> PartHeader:
    said = header["__metadata__"]
    expected = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "layer_convention": CONVENTION,
        "pre_norm_last": "true",
        "dtype": "bfloat16",
    }
    for key, value in expected.items():
        if said[key] != value:
            raise ValueError(f"{key} is {said[key]!r}, expected {value!r}")
    tokens, layers, hidden = header["hidden_states"]["shape"]
    layout = ShardLayout(tuple(json.loads(said["layer_ids"])), hidden, said["model_fingerprint"])
    sample_ids = tuple(json.loads(said["sample_ids"]))
    if layers != len(layout.layer_ids):
        raise ValueError(f"{layers} layers of states for layer ids {list(layout.layer_ids)}")
    for name, shape in _shapes(layout, len(sample_ids), tokens).items():
        found = (header[name]["dtype"], header[name]["shape"])
        if found != (_DTYPES[name][0], shape):
            raise ValueError(f"{name} is {found}, expected {(_DTYPES[name][0], shape)}")
    tensors = {
        name: (int(first), int(end)) for name in _DTYPES for first, end in [header[name]["data_offsets"]]
    }
    return PartHeader(layout, sample_ids, tokens, tensors, data_start)
