"""Attention of test-time training over packed samples, without a matrix of all scores.

At step k the query of row r stands at position r + k. It sees the keys of step 0 up to row r of its own
sample, the context, and of each later step the key of row r alone: the chain that it has drafted itself.

    step 0 keys      step 1   step 2           queries of step 2, rows 0..2 of one sample
    1 0 0            1 0 0    1 0 0
    1 1 0            0 1 0    0 1 0
    1 1 1            0 0 1    0 0 1

In a window of w positions it sees what stands at r + k - w + 1 and later, as vLLM serves it (speculators'
window only counts the context, so that step k sees k positions more).

The context is left to flash attention, which gives its output and the logarithm L of the denominator of the
softmax. The chain joins both. The backward of flash attention, given the joint ones instead, yields the
context's gradients, since it recomputes each weight as exp(score - L) (Dao et al., arXiv:2205.14135,
appendix B).

Q query rows (the supervised ones), R rows, N query heads, M key heads, D width of a head.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3_pipeline.training.flash_cpu import PiecesOnCpu
from eagle3_pipeline.training.flash_gpu import PackedOnGpu
from eagle3_pipeline.training.geometry import Run


class Context(Protocol):
    """Attention of the queries to the keys of step 0."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Output `[Q, N, D]` and log of the denominators, float32 `[Q, N]`."""

    def backward(
        self, gradient: Tensor, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, logs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values."""


def make_context(
    runs: Sequence[Run], window: int | None, step: int, dtype: torch.dtype, device: torch.device
) -> Context:
    """The context of a step; without a window it is that of every step."""
    assert window is None or window > step, "speculator_config refuses such a window"
    if device.type == "cuda":
        return PackedOnGpu(runs, window, step, device)
    return PiecesOnCpu(runs, window, step, dtype)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, chain: Sequence[tuple[Tensor, Tensor]], context: Context
) -> Tensor:
    """Attention output `[Q, N * D]`.

    `query` is `[Q, N, D]`, `keys` and `values` those of step 0, `[R, M, D]`, `chain` those of each later
    step, `[Q, M, D]`.
    """
    links = [side for link in chain for side in link]
    apply: Any = _Attention.apply
    output: Tensor = apply(context, query, keys, values, *links)
    return output.flatten(1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, context: Context, query: Tensor, keys: Tensor, values: Tensor, *links: Tensor
    ) -> Tensor:
        output, logs = context.forward(query, keys, values)
        if links:
            scores = [_dot(query, key) * query.shape[-1] ** -0.5 for key in links[::2]]
            joint = torch.logsumexp(torch.stack([logs, *scores]), 0)
            output = output * _weight(logs, joint, output)
            for score, value in zip(scores, links[1::2], strict=True):
                output += _spread(value, query) * _weight(score, joint, output)
            logs = joint
        ctx.context = context
        ctx.save_for_backward(query, keys, values, output, logs, *links)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, output, logs, *links = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        for_query, for_keys, for_values = ctx.context.backward(gradient, query, keys, values, output, logs)
        scale = query.shape[-1] ** -0.5
        # How far the weights' gradients are off by what softmax takes back, per query and head.
        taken = (gradient * output).sum(-1, dtype=torch.float32)
        for_links = []
        for key, value in zip(links[::2], links[1::2], strict=True):
            weight = torch.exp(_dot(query, key) * scale - logs)
            for_score = (weight * (_dot(gradient, value) - taken) * scale).to(query.dtype).unsqueeze(-1)
            for_query = for_query + _spread(key, query) * for_score
            for_links += [
                _gather(query * for_score, key),
                _gather(gradient * weight.to(query.dtype).unsqueeze(-1), value),
            ]
        return None, for_query, for_keys, for_values, *for_links


def _spread(side: Tensor, query: Tensor) -> Tensor:
    """`[Q, M, D]` by query head, `[Q, N, D]`: N / M query heads share a key head."""
    return side.repeat_interleave(query.shape[1] // side.shape[1], 1)


def _gather(by_query: Tensor, side: Tensor) -> Tensor:
    """`[Q, N, D]` summed over the query heads of each key head, `[Q, M, D]`."""
    return by_query.view(len(side), side.shape[1], -1, side.shape[2]).sum(2)


def _dot(query: Tensor, side: Tensor) -> Tensor:
    """Products of each query with its own row's key, float32 `[Q, N]`."""
    return (query * _spread(side, query)).sum(-1, dtype=torch.float32)


def _weight(logs: Tensor, joint: Tensor, like: Tensor) -> Tensor:
    return torch.exp(logs - joint).to(like.dtype).unsqueeze(-1)
