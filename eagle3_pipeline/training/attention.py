"""Attention of test-time training over packed samples, sample by sample.

At step k the query of row r stands at position r + k. It sees the keys of step 0 up to row r of its own
sample, and of each later step the key of row r alone: the chain that it has drafted itself.

    step 0 keys      step 1   step 2           queries of step 2, rows 0..2 of one sample
    1 0 0            1 0 0    1 0 0
    1 1 0            0 1 0    0 1 0
    1 1 1            0 0 1    0 0 1

One dense mask over a whole batch of n samples would be n times as large, nearly all of it masked.
Q query rows (the supervised ones), R rows, N heads, D width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """One sample: its query rows `[first_query, last_query)` and the rows that they may see."""

    first_query: int
    last_query: int
    first_row: int
    last_row: int


def find_segments(lengths: Sequence[int], supervised: Tensor) -> tuple[Segment, ...]:
    """The samples of a batch that have queries; rows after a sample's last query are left out."""
    ends = torch.tensor(lengths).cumsum(0)
    rows = supervised.cpu()
    after = torch.searchsorted(rows, ends).tolist()
    segments, first_query, first_row = [], 0, 0
    for last_query, end in zip(after, ends.tolist(), strict=True):
        if last_query > first_query:
            segments.append(Segment(first_query, last_query, first_row, int(rows[last_query - 1]) + 1))
        first_query, first_row = last_query, end
    return tuple(segments)


def causal_bias(segment: Segment, supervised: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask `[queries, rows]` of step 0: 0 where a query may look, -inf elsewhere."""
    queries = supervised[segment.first_query : segment.last_query, None]
    rows = torch.arange(segment.first_row, segment.last_row, device=supervised.device)
    bias = torch.zeros(len(queries), len(rows), dtype=dtype, device=supervised.device)
    return bias.masked_fill_(rows > queries, float("-inf"))


def attend(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    chain: Sequence[tuple[Tensor, Tensor]],
    segments: Sequence[Segment],
    biases: Sequence[Tensor],
) -> Tensor:
    """Attention output `[Q, N * D]`.

    `query` is `[Q, N, D]`, `context` are keys and values of step 0, `[R, N, D]`, `chain` those of
    each later step, `[Q, N, D]`; `biases` are of `causal_bias`.
    """
    counts = [segment.last_query - segment.first_query for segment in segments]
    # A slice's gradient is a tensor of zeros as large as the whole; that of all pieces of a split is one.
    queries = torch.split(query, counts)
    keys, values = (_seen(side, segments) for side in context)
    links = [tuple(torch.split(side, counts) for side in link) for link in chain]
    scale = query.shape[-1] ** -0.5
    outputs = []
    for at, bias in enumerate(biases):
        q, k, v = (side[at].transpose(0, 1) for side in (queries, keys, values))
        if not chain:
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias)[0]
        else:
            out = _attend_chain(q, k, v, bias, [(k_[at], v_[at]) for k_, v_ in links], scale)
        outputs.append(out.transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def _seen(side: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """The rows of each segment; what lies between them is nobody's."""
    sizes, at = [], 0
    for segment in segments:
        sizes += [segment.first_row - at, segment.last_row - segment.first_row]
        at = segment.last_row
    return list(torch.split(side, [*sizes, len(side) - at])[1::2])


def _attend_chain(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, chain: list[tuple[Tensor, Tensor]], scale: float
) -> Tensor:
    """One sample, `q` `[N, queries, D]`: a softmax over the context and the row's own chain together."""
    q = q * scale
    scores = torch.baddbmm(bias[None], q, keys.transpose(1, 2))
    links = [(q * k.transpose(0, 1)).sum(-1, keepdim=True) for k, _ in chain]
    weights = torch.cat([scores, *links], dim=-1).softmax(-1)
    context = len(keys[0])
    out = weights[..., :context] @ values
    for at, (_, v) in enumerate(chain):
        out = out + weights[..., context + at, None] * v.transpose(0, 1)
    return out
