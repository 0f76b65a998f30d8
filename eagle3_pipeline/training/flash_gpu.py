"""Attention to the context on a GPU: all runs of a batch in one call of torch's flash attention.

The kernel lays queries and keys of a sequence flush right: the last query stands at the last key. That is
how a run lies in the rows that it sees.

Tests hold this against the operators' schemas and an imitation of them in plain operations, never against the
operators: those need a GPU. benchmarks/gpu/training.py holds them against the CPU before it measures.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.attention.varlen  # registers the two operators below
from torch import Tensor

from eagle3_pipeline.training.geometry import Run

_FORWARD = torch.ops.torch_attn._varlen_attn
_BACKWARD = torch.ops.torch_attn._varlen_attn_backward


class PackedOnGpu:
    """The context of one step; shapes as in attention.py."""

    def __init__(self, runs: Sequence[Run], window: int | None, step: int, device: torch.device) -> None:
        queries = [run.last_query - run.first_query for run in runs]
        rows = [run.last_row - run.first_row for run in runs]
        # Rows that nobody sees are left out; where a sample has two runs, its first rows come twice.
        seen = torch.cat([torch.arange(run.first_row, run.last_row) for run in runs])
        self._seen = seen.to(device, non_blocking=True)
        starts = (torch.tensor([0, *accumulate(sizes)], dtype=torch.int32) for sizes in (queries, rows))
        self._starts = tuple(one.to(device, non_blocking=True) for one in starts)
        self._longest = max(queries), max(rows)
        # The kernel's window counts the keys left of the query's own.
        self._left = -1 if window is None else window - step - 1

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log of the denominators."""
        k, v = (side.index_select(0, self._seen) for side in (keys, values))
        window = [self._left, 0]
        output, logs, _ = _FORWARD(
            query, k, v, *self._starts, *self._longest, self._left < 0, None, window, True
        )
        return output, logs.transpose(0, 1)

    def backward(
        self, gradient: Tensor, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, logs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values."""
        k, v = (side.index_select(0, self._seen) for side in (keys, values))
        sides = (gradient, query, k, v, output, logs.transpose(0, 1).contiguous())
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # state of a dropout
        for_query, of_keys, of_values = _BACKWARD(
            *sides, *self._starts, *self._longest, self._left < 0, unused, None, [self._left, 0]
        )
        for_keys, for_values = (
            torch.zeros_like(side).index_add_(0, self._seen, of)
            for side, of in ((keys, of_keys), (values, of_values))
        )
        return for_query, for_keys, for_values
