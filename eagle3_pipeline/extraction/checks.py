"""Is what the server captured really the hidden states of the sample? A reason if it is not.

These checks look at one sample by itself, at the bits of its states: a bfloat16 is

    sign  exponent (8)  mantissa (7)        without the sign: 0 is zero, 0x7F80 and more is not finite
"""

from collections.abc import Sequence

import torch

_CHUNK_ROWS = 256  # bounds the temporaries: 256 rows x 4 layers x 7168 x 2 bytes = 14 MiB
_MAGNITUDE, _INFINITY = 0x7FFF, 0x7F80
_RUN = 4  # neighbouring rows that are the same: never by chance, and two or three might be a harmless oddity
_GLANCE = 8  # values of a row that are compared before the whole row is


def reason_against(
    wanted_ids: Sequence[int], token_ids: torch.Tensor, states: torch.Tensor, layers: int, hidden: int
) -> str | None:
    """Why `states` must not be trained on, as one word for counting, or None.

    token_ids [tokens] and states [tokens, layers, hidden] are what came back for the ids
    `wanted_ids`. Fewer rows than tokens (prefix cache, chunked prefill), rows that were never
    written, rows of another block and NaN have all been seen in the field.
    """
    if token_ids.tolist() != list(wanted_ids):
        return "token_ids_differ"
    if states.ndim != 3 or states.shape[0] != len(wanted_ids):
        return "rows_differ"
    if states.shape[1:] != (layers, hidden):
        return "shape_differs"
    if states.dtype != torch.bfloat16:
        return "dtype_differs"
    return _reason_in_values(states.view(torch.int16), token_ids)


def _reason_in_values(bits: torch.Tensor, token_ids: torch.Tensor) -> str | None:
    largest = torch.cat(
        [_largest(bits[start : start + _CHUNK_ROWS]) for start in range(0, len(bits), _CHUNK_ROWS)]
    )
    if bool((largest >= _INFINITY).any()):
        return "not_finite"
    zero = largest == 0
    if bool(zero.any()):
        return "zero_layer" if bool(zero.all(dim=0).any()) else "zero_row"
    # The same token over and over has the same states in each row, rightly.
    changes = token_ids[1:] != token_ids[:-1]
    if not bool(changes.any()):
        return None
    same = _same_as_before(bits, largest)
    if bool(same.all(dim=0).any()):
        return "constant_layer"
    return "constant_rows" if _has_run(same, changes) else None


def _largest(bits: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row and layer, as bits: `[rows, layers]`."""
    return (bits & _MAGNITUDE).amax(dim=2)


def _same_as_before(bits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Whether a row is, bit by bit, the one before it, by layer: `[rows - 1, layers]`."""
    glance = bits[:, :, :_GLANCE]
    same = (largest[1:] == largest[:-1]) & (glance[1:] == glance[:-1]).all(dim=2)
    all_rows, all_layers = same.nonzero(as_tuple=True)
    for start in range(0, len(all_rows), _CHUNK_ROWS):
        rows, layers = all_rows[start : start + _CHUNK_ROWS], all_layers[start : start + _CHUNK_ROWS]
        same[rows, layers] = (bits[rows + 1, layers] == bits[rows, layers]).all(dim=1)
    return same


def _has_run(same: torch.Tensor, changes: torch.Tensor) -> bool:
    """Whether `_RUN` neighbouring rows of a layer are the same although their tokens are not."""
    steps = _RUN - 1
    if len(same) < steps:
        return False
    runs = same.unfold(0, steps, 1).all(dim=-1)
    return bool((runs & changes.unfold(0, steps, 1).any(dim=-1)[:, None]).any())
