"""One part of a hidden-state shard: an ordinary safetensors file with this content.

    offsets       [samples + 1]             int64   sample i has the rows offsets[i] .. offsets[i + 1]
    token_ids     [tokens]                  int64   prompt + completion of each sample, as the server had them
    hidden_states [tokens, layers, hidden]  bf16    id k of `layer_ids`: see extraction/layers.py
    loss_mask     [tokens]                  bool    false on the prompt, true on the completion

With precision fp8 the states are float8_e4m3fn, and a row of a layer is its values times its scale:

    scales        [tokens, layers]          float32

With kept "trained" the last layer is not in hidden_states and scales, but only on rows of completions:

    last_offsets  [samples + 1]             int64   sample i has the rows last_offsets[i] .. [i + 1] of these
    last_states   [rows, hidden]                    the rows with loss_mask true, in order
    last_scales   [rows]                    float32 with fp8

Header metadata (strings, as safetensors wants them): `format`, `format_version`, `layer_ids` (JSON),
`layer_convention`, `pre_norm_last`, `dtype`, `kept`, `sample_ids` (JSON), `model_fingerprint`.

The header is read and written here without torch. safetensors' own writer wants one contiguous
tensor per name, which would double the memory of a part, and hides the number of an OSError.
"""

import json
import math
import struct
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.extraction.layers import CONVENTION
from eagle3_pipeline.recipe.extraction import Kept, Precision

FORMAT = "eagle3-hidden-states"
FORMAT_VERSION = "2"
WAY_OUT = "Delete this file and materialise hidden_state_shards again: only the samples in it are made again."
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the bound of safetensors itself
_FIXED_HEADER_BYTES = 2048  # bound for all of the header except sample ids and layer ids
_SIZES = {"I64": 8, "F32": 4, "BF16": 2, "F8_E4M3": 1, "BOOL": 1}
_STATES: dict[Precision, tuple[str, str]] = {
    "bf16": ("BF16", "bfloat16"),
    "fp8": ("F8_E4M3", "float8_e4m3fn"),
}


@dataclass(frozen=True)
class ShardLayout:
    """What all samples of a shard have in common."""

    layer_ids: tuple[int, ...]
    hidden_size: int
    model_fingerprint: str
    precision: Precision = "bf16"
    kept: Kept = "all"

    @property
    def stored_layers(self) -> int:
        """Layers of the tensor hidden_states: all, or all but the last."""
        return len(self.layer_ids) - (self.kept == "trained")

    @property
    def as_captured(self) -> "ShardLayout":
        """What comes from a server, on its way to a part: all rows, in bf16."""
        return replace(self, precision="bf16", kept="all")

    def state_bytes(self, tokens: int, trained_tokens: int) -> int:
        """Bytes of the states, with their scales, of `tokens` tokens, `trained_tokens` of completions."""
        size = _SIZES[_STATES[self.precision][0]]
        row = self.hidden_size * size + (_SIZES["F32"] if self.precision == "fp8" else 0)
        last = trained_tokens if self.kept == "trained" else 0
        return (tokens * self.stored_layers + last) * row

    @property
    def bytes_per_token(self) -> int:
        """Upper bound of a part's bytes per token: states, token id and mask."""
        return self.state_bytes(1, 1) + _SIZES["I64"] + _SIZES["BOOL"]


@dataclass(frozen=True)
class PartHeader:
    """What the header of one part says; `file_bytes` follows from it."""

    layout: ShardLayout
    sample_ids: tuple[str, ...]
    tokens: int
    trained_tokens: int
    """Rows of last_states; 0 where all rows of the last layer are kept."""
    tensors: dict[str, tuple[int, int]]
    """First and last + 1 byte of each tensor within the file."""

    @property
    def file_bytes(self) -> int:
        """Size that the whole file must have."""
        return max(end for _, end in self.tensors.values())


def bytes_of_sample(sample_id: str, tokens: int, trained_tokens: int, layout: ShardLayout) -> int:
    """Upper bound of the bytes that one more sample adds to a part."""
    in_header = len(json.dumps(json.dumps(sample_id))) + 4
    offsets = 2 * _SIZES["I64"]
    per_token = _SIZES["I64"] + _SIZES["BOOL"]
    return layout.state_bytes(tokens, trained_tokens) + tokens * per_token + offsets + in_header


def bytes_of_empty_part(layout: ShardLayout) -> int:
    """Upper bound of the bytes of a part besides its samples."""
    return _LENGTH_BYTES + _FIXED_HEADER_BYTES + len(json.dumps(layout.layer_ids)) + 2 * _SIZES["I64"]


def encode_header(
    layout: ShardLayout, sample_ids: tuple[str, ...], tokens: int, trained_tokens: int
) -> bytes:
    """The bytes before the data of a part; the data follow in the order of `tensors_of`."""
    said = _said(layout) | {
        "layer_ids": json.dumps(list(layout.layer_ids)),
        "sample_ids": json.dumps(list(sample_ids)),
        "model_fingerprint": layout.model_fingerprint,
    }
    header: dict[str, Any] = {"__metadata__": said}
    start = 0
    for name, (dtype, shape) in tensors_of(layout, len(sample_ids), tokens, trained_tokens).items():
        size = _SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return struct.pack("<Q", len(text)) + text


def tensors_of(
    layout: ShardLayout, samples: int, tokens: int, trained_tokens: int
) -> dict[str, tuple[str, list[int]]]:
    """Name -> safetensors' type and shape, in the file's order: large types first: all are aligned."""
    states = _STATES[layout.precision][0]
    scaled, split = layout.precision == "fp8", layout.kept == "trained"
    layers, hidden = layout.stored_layers, layout.hidden_size
    wanted: list[tuple[bool, str, str, list[int]]] = [
        (True, "offsets", "I64", [samples + 1]),
        (split, "last_offsets", "I64", [samples + 1]),
        (True, "token_ids", "I64", [tokens]),
        (scaled, "scales", "F32", [tokens, layers]),
        (scaled and split, "last_scales", "F32", [trained_tokens]),
        (True, "hidden_states", states, [tokens, layers, hidden]),
        (split, "last_states", states, [trained_tokens, hidden]),
        (True, "loss_mask", "BOOL", [tokens]),
    ]
    return {name: (dtype, shape) for is_there, name, dtype, shape in wanted if is_there}


def read_header(path: Path) -> PartHeader:
    """The header of a part, checked against its own size and this format; raises DamagedFile."""
    try:
        return parse_header(path)
    except ValueError as error:
        raise DamagedFile(f"{path} {error}. {WAY_OUT}") from error


def parse_header(path: Path) -> PartHeader:
    """As read_header; raises ValueError with the reason alone."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        parsed = _parse(header, _LENGTH_BYTES + length)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"is not a part of a hidden-state shard ({error})") from error
    size = path.stat().st_size
    if size != parsed.file_bytes:
        raise ValueError(
            f"has {size} bytes, its header speaks of {parsed.file_bytes}. The file was cut or added to"
        )
    return parsed


def read_offsets(path: Path, header: PartHeader, name: str = "offsets") -> "array[int]":
    """Where each sample begins, and the end; raises DamagedFile unless they rise from 0 to the last row."""
    start, end = header.tensors[name]
    offsets = array("q")
    with path.open("rb") as file:
        file.seek(start)
        offsets.frombytes(file.read(end - start))
    rows = header.tokens if name == "offsets" else header.trained_tokens
    if offsets[0] != 0 or offsets[-1] != rows or list(offsets) != sorted(offsets):
        raise DamagedFile(f"{path}: its {name} do not rise from 0 to {rows}. {WAY_OUT}")
    return offsets


def _said(layout: ShardLayout) -> dict[str, str]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "layer_convention": CONVENTION,
        "pre_norm_last": "true",
        "dtype": _STATES[layout.precision][1],
        "kept": layout.kept,
    }


def _parse(header: dict[str, Any], data_start: int) -> PartHeader:
    said = header["__metadata__"]
    precision: Precision = "fp8" if said.get("dtype") == _STATES["fp8"][1] else "bf16"
    kept: Kept = "trained" if said.get("kept") == "trained" else "all"
    tokens, _, hidden = header["hidden_states"]["shape"]
    ids = tuple(json.loads(said["layer_ids"]))
    layout = ShardLayout(ids, hidden, said["model_fingerprint"], precision, kept)
    for key, value in _said(layout).items():
        if said.get(key) != value:
            raise ValueError(f"{key} is {said.get(key)!r}, expected {value!r}")
    sample_ids = tuple(json.loads(said["sample_ids"]))
    trained = header["last_states"]["shape"][0] if kept == "trained" else 0
    tensors: dict[str, tuple[int, int]] = {}
    start = 0
    for name, (dtype, shape) in tensors_of(layout, len(sample_ids), tokens, trained).items():
        end = start + _SIZES[dtype] * math.prod(shape)
        expected = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        if header[name] != expected:
            raise ValueError(f"{name} is {header[name]}, expected {expected}")
        tensors[name] = (data_start + start, data_start + end)
        start = end
    return PartHeader(layout, sample_ids, tokens, trained, tensors)
