"""The loss of one test-time-training step: KL divergence from the verifier, without copies of the logits.

speculators' kl_div, summed over rows that are all supervised:

    L = sum over rows of  sum over v of  p_v * (log p_v - log q_v)        q = softmax(head @ h)
    dL/dlogits = q - p

The gradient is written over the logits block by block while they are in the cache; nothing in float32
as large as [rows, draft] ever exists. A vocabulary of 32,000 at 8,192 rows would want 1 GB per copy.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# speculators adds it to the number of rows that a sum is divided by (losses/utils.py), in case of none.
REDUCTION_EPSILON = 1e-5
_BLOCK_ELEMENTS = 1 << 19  # 2 MiB of float32


class _HeadAndDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, probabilities: Tensor, entropy: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, head)
        proposals = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        size = max(1, _BLOCK_ELEMENTS // logits.shape[1])
        for start in range(0, len(logits), size):
            block = logits[start : start + size]
            wanted = _rows(probabilities, rows, start, len(block))
            highest, proposals[start : start + size] = block.max(-1)
            q = torch.softmax(block, -1, dtype=torch.float32)
            # log of the softmax' denominator, from its largest term
            spread = highest.float() - q.amax(-1).log()
            total += spread.sum() - torch.linalg.vecdot(wanted, block.float()).sum()
            block.copy_(q.sub_(wanted))
        total -= entropy[rows].sum()
        ctx.save_for_backward(hidden, head, logits)
        ctx.mark_non_differentiable(proposals)
        return total, proposals

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, head, difference = ctx.saved_tensors
        scale = gradients[0].to(head.dtype)
        for_hidden = (difference @ head) * scale
        for_head = None
        if ctx.needs_input_grad[1]:
            for_head = (difference.T @ hidden) * scale
        return for_hidden, for_head, None, None, None


def _rows(table: Tensor, rows: Tensor, start: int, count: int) -> Tensor:
    """`table[rows[start : start + count]]`, as a view where these rows lie side by side (nearly always)."""
    first, last = int(rows[start]), int(rows[start + count - 1])
    if last - first == count - 1:  # rows rise
        return table[first : last + 1]
    return table[rows[start : start + count]]


def head_and_divergence(
    hidden: Tensor, head: Tensor, probabilities: Tensor, entropy: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Divergence summed over the rows (scalar) and the most probable draft token of each row, `[n]`.

    `hidden` is `[n, H]`, `head` `[draft, H]`, `probabilities` float32 `[S, draft]` of the verifier with
    its `entropy` `[S]`, and `rows` `[n]` says which of them belong to which row of `hidden`.
    """
    apply: Any = _HeadAndDivergence.apply
    result: tuple[Tensor, Tensor] = apply(hidden, head, probabilities, entropy, rows)
    return result


def verifier_distribution(
    hidden: Tensor, norm: Tensor, epsilon: float, head: Tensor
) -> tuple[Tensor, Tensor]:
    """Probabilities of the verifier over the draft's tokens, float32 `[S, draft]`, and their entropy `[S]`.

    `hidden` `[S, H]` is the last layer's output before the final norm `norm` `[H]`; `head` are the
    target's rows of the draft's tokens. "Entropy" is the sum of -p log p.
    """
    scores = F.linear(F.rms_norm(hidden.float(), norm.shape, norm.float(), epsilon).to(head.dtype), head)
    probabilities = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    entropy = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    size = max(1, _BLOCK_ELEMENTS // scores.shape[1])
    for start in range(0, len(scores), size):
        block = scores[start : start + size].float()
        logs = torch.log_softmax(block, -1)
        p = torch.exp(logs, out=probabilities[start : start + size])
        entropy[start : start + size] = -torch.linalg.vecdot(p, logs)
    return probabilities, entropy
