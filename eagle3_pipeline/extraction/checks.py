"""Is what the server captured really the hidden states of the sample? A reason if it is not."""

from collections.abc import Sequence

import torch

_CHUNK_ROWS = 256  # bounds the temporaries: 256 rows x 4 layers x 7168 x 4 bytes = 28 MiB


def reason_against(
    wanted_ids: Sequence[int], token_ids: torch.Tensor, states: torch.Tensor, layers: int, hidden: int
) -> str | None:
    """Why `states` must not be trained on, as one word for counting, or None.

    token_ids [tokens] and states [tokens, layers, hidden] are what came back for the ids
    `wanted_ids`. Fewer rows than tokens (prefix cache, chunked prefill), rows that were never
    written and NaN have all been seen in the field.
    """
    if token_ids.tolist() != list(wanted_ids):
        return "token_ids_differ"
    if states.ndim != 3 or states.shape[0] != len(wanted_ids):
        return "rows_differ"
    if states.shape[1:] != (layers, hidden):
        return "shape_differs"
    if states.dtype != torch.bfloat16:
        return "dtype_differs"
    return _reason_in_values(states, varied=len(set(wanted_ids)) > 1)


def _reason_in_values(states: torch.Tensor, *, varied: bool) -> str | None:
    first = states[:1]
    constant = torch.ones(states.shape[1], dtype=torch.bool)
    zero_layers = torch.ones(states.shape[1], dtype=torch.bool)
    zero_row = False
    for start in range(0, len(states), _CHUNK_ROWS):
        chunk = states[start : start + _CHUNK_ROWS]
        low, high = chunk.amin(dim=2), chunk.amax(dim=2)  # both carry NaN and infinities
        if not bool((low.isfinite() & high.isfinite()).all()):
            return "not_finite"
        zero = (low == 0) & (high == 0)
        zero_row = zero_row or bool(zero.any())
        zero_layers &= zero.all(dim=0)
        constant &= (chunk == first).all(dim=2).all(dim=0)
    if bool(zero_layers.any()):
        return "zero_layer"
    if zero_row:
        return "zero_row"
    # The same token over and over has the same states in each row, rightly.
    return "constant_layer" if varied and bool(constant.any()) else None
