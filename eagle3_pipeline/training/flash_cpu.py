"""Attention to the context on the CPU, piece by piece of the queries.

A piece is a stretch of one run; it is given only the rows that its queries may see. The forward is torch's
flash attention. Its backward is slower than the products written out: by half with samples of 200 tokens, and
the same with 2,000.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_pipeline.training.geometry import Run

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# Queries of a piece: of a long run, the first ones then do without the rows of the last ones, and the scores
# of a piece, which the backward writes down, stay small.
PIECE = 256


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
            for first in range(run.first_query, run.last_query, PIECE)
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
        g, q, k, v = (_heads_first(side, query)[0] for side in (gradient, query, keys, values))
        scale = query.shape[-1] ** -0.5
        # What softmax takes back of each weight's gradient, per head and query.
        taken = (gradient * output).sum(-1, dtype=torch.float32).transpose(0, 1).unsqueeze(-1)
        log = logs.transpose(0, 1).unsqueeze(-1)
        for_query, for_keys, for_values = (torch.zeros_like(side) for side in (q, k, v))
        for one in self._pieces:
            at, seen = one.queries, one.rows
            # In float32, as the forward has them: an exponent takes an error as it is.
            full, other = q[:, at].float(), k[:, seen].float().transpose(1, 2)
            weights = torch.baddbmm(one.bias[0].float(), full, other, alpha=scale).sub_(log[:, at]).exp_()
            for_weights = (g[:, at] @ v[:, seen].transpose(1, 2)).float()
            for_scores = for_weights.sub_(taken[:, at]).mul_(weights).mul_(scale).to(q.dtype)
            for_query[:, at] = for_scores @ k[:, seen]
            for_keys[:, seen] += for_scores.transpose(1, 2) @ q[:, at]
            for_values[:, seen] += weights.to(g.dtype).transpose(1, 2) @ g[:, at]
        shared = (keys.shape[1], -1, *for_keys.shape[1:])  # query heads by the key head that they share
        of_keys, of_values = (side.view(shared).sum(1).transpose(0, 1) for side in (for_keys, for_values))
        return for_query.transpose(0, 1), of_keys, of_values


def _piece(run: Run, first: int, window: int | None, step: int, dtype: torch.dtype) -> _Piece:
    last = min(first + PIECE, run.last_query)
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
