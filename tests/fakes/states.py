"""Hidden states of the stand-in: a known function of token id, position, layer and dimension, and its file.

    hidden_states  [tokens, layers, hidden]  bfloat16
    token_ids      [tokens]                  int64

Where the model's folder has an output head, the last layer's row of a token is a state after which the
head says the next token, as a real model's does for what it wrote itself. All other values are
multiples of 1/128 in [-1, 1). bfloat16 holds each value exactly, so a test may compare with `==`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.fakes.faults import Faults, strikes
from tests.fakes.heads import SpokenHead


def expected_states(
    token_ids: Sequence[int], layers: Sequence[int], hidden: int, head: SpokenHead | None
) -> npt.NDArray[np.float32]:
    """The states `[tokens, layers, hidden]` that the stand-in of a model with `head` writes for these ids."""
    states = _mixed(token_ids, layers, hidden)
    if head is not None and head.num_layers in layers and len(token_ids) > 1:
        said = _saying_next(token_ids, head)
        there = np.flatnonzero(said.any(axis=1))  # some tokens of a model are never said
        states[there, list(layers).index(head.num_layers)] = said[there]
    return states


def _saying_next(token_ids: Sequence[int], head: SpokenHead) -> npt.NDArray[np.float32]:
    """Last states `[tokens - 1, hidden]` after which each next token comes, cut to what bfloat16 holds."""
    # The norm takes a factor out again: with it no two neighbouring rows are the same.
    factor = 1 + np.arange(len(token_ids) - 1, dtype=np.float32)[:, None] % 8 / 8
    states = np.ascontiguousarray(head.states_before(token_ids[1:]) * factor, dtype=np.float32)
    return (states.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _mixed(token_ids: Sequence[int], layers: Sequence[int], hidden: int) -> npt.NDArray[np.float32]:
    ids = np.asarray(token_ids, dtype=np.uint32)[:, None, None]
    positions = np.arange(len(token_ids), dtype=np.uint32)[:, None, None]
    layer = np.asarray(layers, dtype=np.uint32)[None, :, None]
    dimension = np.arange(hidden, dtype=np.uint32)[None, None, :]
    mixed = ids * np.uint32(2654435761) ^ positions * np.uint32(2246822519) ^ layer * np.uint32(3266489917)
    mixed = (mixed ^ dimension * np.uint32(668265263)) * np.uint32(374761393)
    values = (mixed >> np.uint32(24)).astype(np.int32) - 128
    states: npt.NDArray[np.float32] = (values / 128).astype(np.float32)
    return states


def write_states(
    path: Path,
    token_ids: list[int],
    layers: Sequence[int],
    hidden: int,
    head: SpokenHead | None,
    faults: Faults,
) -> None:
    """Write the file as the project's connector does (temporary name, rename), with its faults."""
    states = expected_states(token_ids, layers, hidden, head)
    if strikes(faults.nan_share, "nan", token_ids):
        states[len(token_ids) // 2, 0, 0] = np.nan
    if strikes(faults.shifted_share, "shifted", token_ids):
        states = np.roll(states, 1, axis=0)
    if strikes(faults.short_share, "short", token_ids):
        states = states[:-1]
    written = list(token_ids)
    if strikes(faults.wrong_ids_share, "wrong_ids", token_ids):
        written[-1] ^= 1
    bits = (np.ascontiguousarray(states).view(np.uint32) >> 16).astype(np.uint16)
    data = _safetensors(
        {
            "hidden_states": ("BF16", states.shape, bits.tobytes()),
            "token_ids": ("I64", (len(written),), np.asarray(written, dtype=np.int64).tobytes()),
        }
    )
    if strikes(faults.torn_share, "torn", token_ids):
        data = data[: len(data) * 2 // 3]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def _safetensors(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """Bytes of a safetensors file: length of the header, header, data. numpy has no bfloat16 for it."""
    header, offset = {}, 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())
