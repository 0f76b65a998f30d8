"""Attention to the context on the CPU: torch's flash attention, piece by piece of the queries.

A piece is a stretch of one run; it is given only the rows that its queries may see.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_pipeline.training.geometry import Run

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Queries of a piece: of a long run, the first ones then do without the rows of the last ones.
_PIECE = 512


@dataclass(frozen=True)
class _Piece:
    queries: slice
    rows: slice
    bias: Tensor
    """`[1, 1, queries, rows]`: 0 where a query may look, -inf elsewhere."""


class PiecesOnCpu:
    """The context of one step; shapes as in attention.py."""

    def __init__(self, runs: Sequence[Run], window: int | None, step: int, dtype: torch.dtype) -> None:
        self._pieces = [
            _piece(run, first, window, step, dtype)
            for run in runs
            for first in range(run.first_query, run.last_query, _PIECE)
        ]

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log of the denominators."""
        output = torch.empty_like(query)
        logs = torch.empty(query.shape[:2], dtype=torch.float32)
        q, k, v = (_heads_first(side, query) for side in (query, keys, values))
        for one in self._pieces:
            piece, log = _FORWARD(
                q[:, :, one.queries], k[:, :, one.rows], v[:, :, one.rows], attn_mask=one.bias
            )
            output[one.queries] = piece[0].transpose(0, 1)
            logs[one.queries] = log[0].transpose(0, 1)
        return output, logs

    def backward(
        self, gradient: Tensor, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, logs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values."""
        g, q, k, v, out = (_heads_first(side, query) for side in (gradient, query, keys, values, output))
        log = logs.transpose(0, 1)[None]
        for_query = torch.empty_like(query)
        for_keys, for_values = (torch.zeros_like(side[0].transpose(0, 1)) for side in (k, v))
        for one in self._pieces:
            at, seen = one.queries, one.rows
            sides = (g[:, :, at], q[:, :, at], k[:, :, seen], v[:, :, seen], out[:, :, at], log[:, :, at])
            of_query, of_keys, of_values = _BACKWARD(*sides, 0.0, False, attn_mask=one.bias)
            for_query[at] = of_query[0].transpose(0, 1)
            for_keys[seen] += of_keys[0].transpose(0, 1)
            for_values[seen] += of_values[0].transpose(0, 1)
        shared = (len(keys), keys.shape[1], -1, keys.shape[2])  # query heads by the key head that they share
        return for_query, for_keys.view(shared).sum(2), for_values.view(shared).sum(2)


def _piece(run: Run, first: int, window: int | None, step: int, dtype: torch.dtype) -> _Piece:
    last = min(first + _PIECE, run.last_query)
    first_row, last_row = run.row_of(first), run.row_of(last)
    # Row j is in the window of the query of row r, at position r + step, if j > r + step - window.
    behind = last_row - run.first_row if window is None else window - step
    seen = max(run.first_row, first_row - behind + 1)
    queries, rows = torch.arange(first_row, last_row)[:, None], torch.arange(seen, last_row)
    bias = torch.zeros(1, 1, last - first, last_row - seen, dtype=dtype)
    bias.masked_fill_((rows > queries) | (rows <= queries - behind), float("-inf"))
    return _Piece(slice(first, last), slice(seen, last_row), bias)


def _heads_first(side: Tensor, query: Tensor) -> Tensor:
    """`[rows, heads, D]` as `[1, N, rows, D]`."""
    return side.repeat_interleave(query.shape[1] // side.shape[1], 1).transpose(0, 1)[None]
