"""Each loss is speculators' own, whatever the size of a block, and keeps nothing large in float32."""

import weakref
from typing import get_args

import pytest
import torch
from speculators.losses import loss_function, resolve_loss_config
from torch import Tensor

from eagle3_pipeline.recipe.training import LossName
from eagle3_pipeline.training import loss
from eagle3_pipeline.training.loss import REDUCTION_EPSILON, head_and_loss, make_loss

_NAMES = get_args(LossName)
_ROWS, _HIDDEN, _DRAFT = 23, 16, 40


def _sides(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, the verifier's scores, and which of them belong to which state."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, _HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(_DRAFT, _HIDDEN, generator=generator).to(dtype).requires_grad_()
    scores = 2 * torch.randn(_ROWS + 5, _DRAFT, generator=generator)
    rows = torch.tensor([*range(10), *range(12, 25)])
    return hidden, head, scores.to(dtype), rows


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("block", [3 * _DRAFT, 1 << 19])
def test_the_sum_and_its_gradients_are_those_of_speculators_function(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss._BLOCK_ELEMENTS, "cpu", block)
    hidden, head, scores, rows = _sides(torch.float32)
    total, proposals = head_and_loss(hidden, head, rows, make_loss(name, scores))
    logits = torch.nn.functional.linear(hidden, head)
    ones = torch.ones(1, _ROWS)
    function = resolve_loss_config(name, "eager")[name][0]
    mean = loss_function(logits[None], scores[rows][None], ones, ones, loss_fn=function)
    assert torch.allclose(total / (_ROWS + REDUCTION_EPSILON), mean, rtol=1e-5)
    assert torch.equal(proposals, logits.argmax(-1))
    ours = torch.autograd.grad(3 * total, (hidden, head))
    theirs = torch.autograd.grad(3 * (_ROWS + REDUCTION_EPSILON) * mean, (hidden, head))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("name", _NAMES)
def test_in_bfloat16_it_stays_near_and_keeps_no_float32_of_all_logits(name: str) -> None:
    hidden, head, scores, rows = _sides(torch.float32)
    full, _ = head_and_loss(hidden, head, rows, make_loss(name, scores))
    kept: list[weakref.ref[Tensor]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(weakref.ref(tensor))  # what a block saves for itself goes with it
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        half, _ = head_and_loss(
            hidden.to(torch.bfloat16), head.to(torch.bfloat16), rows, make_loss(name, scores)
        )
    assert torch.allclose(half, full, rtol=0.02)
    found = [one for one in (reference() for reference in kept) if one is not None]
    assert {one.dtype for one in found if one.numel() >= _ROWS * _DRAFT} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["kl_div", "tv"])
def test_the_head_alone_can_be_trained(name: str) -> None:
    hidden, head, scores, rows = _sides(torch.float32)
    both, _ = head_and_loss(hidden, head, rows, make_loss(name, scores))
    alone, _ = head_and_loss(hidden.detach(), head, rows, make_loss(name, scores))
    expected = torch.autograd.grad(both, head)[0]
    assert torch.equal(torch.autograd.grad(alone, head)[0], expected)


@pytest.mark.parametrize("name", _NAMES)
def test_judging_gives_the_same_sum_and_leaves_no_gradient(name: str) -> None:
    hidden, head, scores, rows = _sides(torch.float32)
    trained, proposals = head_and_loss(hidden, head, rows, make_loss(name, scores))
    with torch.no_grad():
        judged, same = head_and_loss(hidden.detach(), head.detach(), rows, make_loss(name, scores))
    assert torch.equal(judged, trained.detach())
    assert torch.equal(same, proposals)
    assert not judged.requires_grad


def test_a_step_without_rows_costs_nothing() -> None:
    hidden, head, scores, _ = _sides(torch.float32)
    total, proposals = head_and_loss(
        hidden[:0], head, torch.empty(0, dtype=torch.int64), make_loss("kl_div", scores)
    )
    total.backward()  # type: ignore[no-untyped-call]
    assert (float(total.detach()), len(proposals)) == (0.0, 0)
    assert head.grad is not None
    assert not head.grad.any()


def test_a_factor_that_bfloat16_does_not_have_scales_gradients_as_it_is() -> None:
    hidden, head, scores, rows = _sides(torch.bfloat16)
    factor = 1 + 2**-9 + 2**-12  # bfloat16 has 1 and 1 + 2 ** -7
    loss_of = make_loss("kl_div", scores)
    total, _ = head_and_loss(hidden, head, rows, loss_of)
    plain = torch.autograd.grad(total, (hidden, head), retain_graph=True)
    scaled = torch.autograd.grad(factor * total, (hidden, head))
    for one, other in zip(plain, scaled, strict=True):
        assert torch.equal(other, (one.float() * factor).to(torch.bfloat16))
        assert not torch.equal(other, one)
