"""Attention in pieces is a plain softmax over what a query may see, on the CPU and as asked of a GPU."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_pipeline.training import flash_cpu, flash_gpu
from eagle3_pipeline.training.attention import attend, make_context
from eagle3_pipeline.training.flash_gpu import PackedOnGpu
from eagle3_pipeline.training.geometry import Run

_HEADS, _KEY_HEADS, _WIDTH = 4, 2, 8
# Two samples of 30 and 20 rows: two runs with a gap between them, rows after the last query; one whole run.
_RUNS = (Run(0, 7, 0, 12), Run(7, 16, 0, 25), Run(16, 36, 30, 50))
_ROWS, _QUERIES = 50, 36
_CPU = torch.device("cpu")


def _sides(
    rows: int, queries: int, steps: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)

    def some(count: int, heads: int) -> Tensor:
        values = torch.randn(count, heads, _WIDTH, generator=generator).to(dtype)
        return values.requires_grad_()

    chain = [(some(queries, _KEY_HEADS), some(queries, _KEY_HEADS)) for _ in range(steps)]
    return some(queries, _HEADS), some(rows, _KEY_HEADS), some(rows, _KEY_HEADS), chain


def _dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chain: Sequence[tuple[Tensor, Tensor]],
    runs: Sequence[Run],
    window: int | None,
) -> Tensor:
    """Each query by itself."""
    outputs = []
    for run in runs:
        for at in range(run.first_query, run.last_query):
            row = run.row_of(at)
            first = run.first_row if window is None else max(run.first_row, row + len(chain) - window + 1)
            k = torch.cat([keys[first : row + 1], *(key[at, None] for key, _ in chain)])
            v = torch.cat([values[first : row + 1], *(value[at, None] for _, value in chain)])
            k, v = (side.repeat_interleave(_HEADS // _KEY_HEADS, 1) for side in (k, v))
            weights = (torch.einsum("hd,khd->hk", query[at], k) * _WIDTH**-0.5).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(outputs).flatten(1)


def _gradients(output: Tensor, *sides: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return torch.autograd.grad((output * torch.randn(output.shape, generator=generator)).sum(), sides)


@pytest.mark.parametrize("window", [None, 4, 11])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("piece", [3, 512])
def test_output_and_gradients_are_those_of_a_softmax_over_what_may_be_seen(
    piece: int, steps: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_cpu, "PIECE", piece)
    query, keys, values, chain = _sides(_ROWS, _QUERIES, steps)
    context = make_context(_RUNS, window, steps, torch.float32, _CPU)
    ours = attend(query, keys, values, chain, context)
    expected = _dense(query, keys, values, chain, _RUNS, window)
    assert torch.allclose(ours, expected, atol=1e-5)
    leaves = (query, keys, values, *(side for link in chain for side in link))
    for mine, theirs in zip(_gradients(ours, *leaves), _gradients(expected, *leaves), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_a_long_run_in_a_short_window_meets_blocks_that_it_does_not_see_at_all() -> None:
    runs = (Run(0, 1300, 0, 1400),)
    query, keys, values, chain = _sides(1400, 1300, 1)
    ours = attend(query, keys, values, chain, make_context(runs, 10, 1, torch.float32, _CPU))
    assert torch.allclose(ours, _dense(query, keys, values, chain, runs, 10), atol=1e-5)
    assert all(bool(one.isfinite().all()) for one in _gradients(ours, query, keys, values))


def test_in_bfloat16_it_stays_near_the_full_precision() -> None:
    query, keys, values, chain = _sides(_ROWS, _QUERIES, 2)
    full = _dense(query, keys, values, chain, _RUNS, None)
    half = attend(
        *(side.to(torch.bfloat16) for side in (query, keys, values)),
        [(key.to(torch.bfloat16), value.to(torch.bfloat16)) for key, value in chain],
        make_context(_RUNS, None, 2, torch.bfloat16, _CPU),
    )
    assert torch.allclose(half.float(), full, atol=0.02)


def _sequences(starts: Tensor) -> list[slice]:
    bounds = starts.tolist()
    return [slice(first, last) for first, last in pairwise(bounds)]


def _scores(q: Tensor, k: Tensor, window: list[int]) -> Tensor:
    """`[N, queries, keys]` of one sequence, flush right, with `window` keys left and right of each query."""
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(_HEADS // _KEY_HEADS, 1)) * _WIDTH**-0.5
    ahead = torch.arange(len(k)) - (torch.arange(len(q))[:, None] + len(k) - len(q))
    left = len(k) if window[0] < 0 else window[0]
    return scores.masked_fill((ahead > window[1]) | (ahead < -left), float("-inf"))


def _kernel(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What torch says of `_varlen_attn`, in plain operations."""
    query, keys, values, starts, key_starts, _, _, causal, scale, window, grouped = arguments
    assert grouped
    assert scale is None
    assert causal == (window == [-1, 0])
    outputs, logs = [], []
    for at, seen in zip(_sequences(starts), _sequences(key_starts), strict=True):
        scores = _scores(query[at], keys[seen], window)
        spread = values[seen].repeat_interleave(_HEADS // _KEY_HEADS, 1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), spread))
        logs.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(logs, 1), torch.empty(0)


def _kernel_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """And of `_varlen_attn_backward`: weights recomputed from the logs."""
    gradient, query, keys, values, output, logs, starts, key_starts, _, _, _, _, _, window = arguments
    assert logs.is_contiguous()
    shared = _HEADS // _KEY_HEADS
    result = [torch.empty_like(query), torch.empty_like(keys), torch.empty_like(values)]
    for at, seen in zip(_sequences(starts), _sequences(key_starts), strict=True):
        weights = torch.exp(_scores(query[at], keys[seen], window) - logs[:, at, None])
        k, v = (side[seen].repeat_interleave(shared, 1) for side in (keys, values))
        off = torch.einsum("qhd,khd->hqk", gradient[at], v) - (gradient * output)[at].sum(-1).T[..., None]
        for_scores = weights * off * _WIDTH**-0.5
        result[0][at] = torch.einsum("hqk,khd->qhd", for_scores, k)
        for place, by_query in ((1, (for_scores, query[at])), (2, (weights, gradient[at]))):
            side = torch.einsum("hqk,qhd->khd", *by_query)
            result[place][seen] = side.unflatten(1, (_KEY_HEADS, shared)).sum(2)
    return result[0], result[1], result[2]


@pytest.mark.parametrize("window", [None, 4, 11])
@pytest.mark.parametrize("steps", [0, 2])
def test_what_a_gpu_is_asked_for_is_what_the_cpu_does(
    steps: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_gpu, "_FORWARD", _kernel)
    monkeypatch.setattr(flash_gpu, "_BACKWARD", _kernel_backward)
    query, keys, values, chain = _sides(_ROWS, _QUERIES, steps)
    leaves = (query, keys, values, *(side for link in chain for side in link))
    packed = attend(query, keys, values, chain, PackedOnGpu(_RUNS, window, steps, _CPU))
    pieces = attend(query, keys, values, chain, make_context(_RUNS, window, steps, torch.float32, _CPU))
    assert torch.allclose(packed, pieces, atol=1e-5)
    for mine, theirs in zip(_gradients(packed, *leaves), _gradients(pieces, *leaves), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_torch_takes_what_a_gpu_is_asked_for(window: int | None) -> None:
    nowhere = torch.device("meta")  # schemas and shapes, no numbers
    query = torch.empty(_QUERIES, _HEADS, _WIDTH, dtype=torch.bfloat16, device=nowhere)
    side = torch.empty(_ROWS, _KEY_HEADS, _WIDTH, dtype=torch.bfloat16, device=nowhere)
    packed = PackedOnGpu(_RUNS, window, 0, nowhere)
    output, logs = packed.forward(query, side, side)
    assert (output.shape, logs.shape, logs.dtype) == (query.shape, query.shape[:2], torch.float32)
    gradients = packed.backward(output, query, side, side, output, logs)
    assert [one.shape for one in gradients] == [query.shape, side.shape, side.shape]
