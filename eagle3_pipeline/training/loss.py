"""The loss of one test-time-training step, without float32 copies of all its logits.

The gradient is written over the logits block by block, on a CPU while they are in the cache. In float32 there
are the verifier's probabilities, for kl_div, and three temporaries of a block: 2 MiB each on a CPU, up to
256 MiB each on a GPU. A vocabulary of 32,000 at 8,192 rows would want 1 GB per copy.

speculators' kl_div, summed over rows that are all supervised, is written out:

    L = sum over rows of  sum over v of  p_v * (log p_v - log q_v)        q = softmax(head @ h)
    dL/dlogits = q - p

Its other losses are its own functions, differentiated by autograd within a block.

n rows of a step, S supervised rows, H hidden size.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from speculators.losses import resolve_loss_config
from torch import Tensor

# speculators adds it to the number of rows that a sum is divided by (losses/utils.py), in case of none.
REDUCTION_EPSILON = 1e-5
# Logits of a block: 2 MiB of float32 stay in a CPU's cache; a GPU wants few and large kernels.
_BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}


class Loss(Protocol):
    """A distance between draft and verifier, which knows the verifier's part."""

    def __call__(self, block: Tensor, rows: Tensor | slice, differentiate: bool) -> tuple[Tensor, Tensor]:
        """Summed distance (scalar) and most probable token of each row of `block`, logits `[b, draft]`.

        `rows` are the verifier's rows for them. Where asked to, it replaces the block by its gradient.
        """


class KlDivergence:
    """sum of p * (log p - log q); p float32 `[S, draft]`."""

    def __init__(self, scores: Tensor) -> None:
        self._probabilities = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        self._entropy = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
        size = _block_rows(scores)
        for start in range(0, len(scores), size):
            logs = torch.log_softmax(scores[start : start + size].float(), -1)
            p = torch.exp(logs, out=self._probabilities[start : start + size])
            self._entropy[start : start + size] = -torch.linalg.vecdot(p, logs)

    def __call__(self, block: Tensor, rows: Tensor | slice, differentiate: bool) -> tuple[Tensor, Tensor]:
        """As Loss says."""
        wanted = self._probabilities[rows]
        highest, proposals = block.max(-1)
        q = torch.softmax(block, -1, dtype=torch.float32)
        # log of the softmax' denominator, from its largest term
        spread = highest.float() - q.amax(-1).log()
        total = spread.sum() - torch.linalg.vecdot(wanted, block.float()).sum() - self._entropy[rows].sum()
        if differentiate:
            block.copy_(q.sub_(wanted))
        return total, proposals


class NamedLoss:
    """One of speculators' losses, which take the verifier's scores, `[S, draft]`."""

    def __init__(self, name: str, scores: Tensor) -> None:
        # Their kernels need a GPU.
        implementation = "eager" if scores.device.type == "cpu" else "fused"
        self._function = resolve_loss_config(name, implementation)[name][0]
        self._scores = scores

    def __call__(self, block: Tensor, rows: Tensor | slice, differentiate: bool) -> tuple[Tensor, Tensor]:
        """As Loss says."""
        proposals = block.argmax(-1)
        logits = block.detach().float().requires_grad_(differentiate)
        with torch.set_grad_enabled(differentiate):
            total = self._function(logits[None], self._scores[rows].float()[None]).sum()
        if differentiate:
            block.copy_(torch.autograd.grad(total, logits)[0])
        return total.detach(), proposals


def make_loss(name: str, scores: Tensor) -> Loss:
    """The loss of that name against a verifier's scores `[S, draft]`."""
    return KlDivergence(scores) if name == "kl_div" else NamedLoss(name, scores)


def verifier_scores(hidden: Tensor, norm: Tensor, epsilon: float, head: Tensor) -> Tensor:
    """Scores of the verifier for the draft's tokens, `[S, draft]`.

    `hidden` `[S, H]` is the last layer's output before the final norm `norm` `[H]`; `head` are the
    target's rows of the draft's tokens.
    """
    return F.linear(F.rms_norm(hidden.float(), norm.shape, norm.float(), epsilon).to(head.dtype), head)


class _HeadAndLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, rows: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, head)
        proposals = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        differentiate = any(ctx.needs_input_grad)
        size = _block_rows(logits)
        for start in range(0, len(logits), size):
            block = logits[start : start + size]
            which = _side_by_side(rows[start : start + size])
            value, proposals[start : start + size] = loss(block, which, differentiate)
            total += value
        ctx.save_for_backward(hidden, head, logits)
        ctx.mark_non_differentiable(proposals)
        return total, proposals

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, head, gradient = ctx.saved_tensors
        for_hidden = _scale(gradient @ head, gradients[0]) if ctx.needs_input_grad[0] else None
        for_head = _scale(gradient.T @ hidden, gradients[0]) if ctx.needs_input_grad[1] else None
        return for_hidden, for_head, None, None


def _scale(product: Tensor, factor: Tensor) -> Tensor:
    """`product` times a float32 scalar, in place.

    Block by block in float32: a GPU rounds a scalar that lies on it to the dtype of the product, bfloat16.
    """
    for block in torch.split(product, _block_rows(product)):
        block.copy_(block.float().mul_(factor))
    return product


def head_and_loss(hidden: Tensor, head: Tensor, rows: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Summed loss (scalar) and the most probable draft token of each row, `[n]`.

    `hidden` is `[n, H]`, `head` `[draft, H]`, and `rows` `[n]` says which of the verifier's rows belong to
    which row of `hidden`.
    """
    apply: Any = _HeadAndLoss.apply
    result: tuple[Tensor, Tensor] = apply(hidden, head, rows, loss)
    return result


def block_bytes(logits: int, device: str) -> int:
    """Bytes of the float32 temporaries of one block, of so many logits in all, on a kind of device."""
    return 3 * 4 * min(logits, _BLOCK_ELEMENTS[device])


def _block_rows(logits: Tensor) -> int:
    return max(1, _BLOCK_ELEMENTS[logits.device.type] // logits.shape[1])


def _side_by_side(rows: Tensor) -> Tensor | slice:
    """Rising rows as a slice where they lie side by side (nearly always): a view instead of a copy.

    On a GPU the question would cost more than the copy.
    """
    if rows.is_cpu and int(rows[-1]) - int(rows[0]) == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows
