"""Our pass over a packed batch gives the numbers of speculators' own forward, for all its variants."""

from typing import Any

import pytest
import speculators.models.eagle3.metrics as reference
import torch
from speculators.losses import resolve_loss_config

from eagle3_pipeline.training.batches import Batch, pack
from eagle3_pipeline.training.draft import NEW_NORMS
from eagle3_pipeline.training.forward import train_forward
from tests.training.tiny import HIDDEN, draft, memory

_DECAY = 0.8
_VARIANTS = [
    {},
    {"norm_before_residual": True, "norm_output": True},
    {"fc_norm": True},
    {"norm_before_fc": True},
    NEW_NORMS,
]


def _gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def _reference_loss(model: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """speculators' loss over the same rows: both the row and its label are supervised, in one sample."""
    rows = sum(batch.lengths)
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[batch.supervised] = True
    verifier = torch.zeros(rows, HIDDEN, dtype=batch.verifier.dtype)
    verifier[batch.supervised] = batch.verifier
    documents = torch.repeat_interleave(torch.arange(len(batch.lengths)), torch.tensor(batch.lengths))
    positions = torch.cat([torch.arange(length) for length in batch.lengths]) + 1
    align = reference.align_for_step

    def align_within_samples(logits: Any, targets: Any, mask_: Any, right: Any, step: int) -> Any:
        logits, targets, mask_, right = align(logits, targets, mask_, right, step)
        same = documents[step:] == documents[: rows - step]
        return logits, targets, mask_ & mask[None, : rows - step] & same[None], right

    monkeypatch.setattr(reference, "align_for_step", align_within_samples)
    _, loss, _ = model(
        batch.states[None].float(),
        batch.tokens[None],
        documents[None],
        loss_mask=mask[None],
        position_ids=positions[None],
        verifier_last_hidden_states=verifier[None].float(),
        ttt_steps=3,
        ttt_step_loss_decay=_DECAY,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    return loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "norms", _VARIANTS, ids=["plain", "residual and output", "fc each", "fc whole", "new"]
)
def test_loss_and_every_gradient_are_those_of_speculators(
    kind: str, norms: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = draft(kind, **norms)
    batch = pack(memory([(23, 7), (11, 4), (30, 12)]), range(3))
    steps = train_forward(model, batch, 3, torch.float32)
    loss = torch.stack([_DECAY**k * step.mean for k, step in enumerate(steps)]).sum()
    ours = _gradients(model, loss)
    expected = _reference_loss(model, batch, monkeypatch)
    theirs = _gradients(model, expected)
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, atol=1e-5 * float(gradient.abs().max())), name


def test_without_train_head_the_head_stays_the_targets_rows() -> None:
    model = draft(train_head=False)
    steps = train_forward(model, pack(memory([(23, 7)]), [0]), 1, torch.float32)
    assert "lm_head.weight" not in _gradients(model, steps[0].loss)
    assert torch.equal(model.lm_head.weight, model.verifier_lm_head.weight)


def test_half_precision_products_stay_near_the_full_ones() -> None:
    model = draft()
    batch = pack(memory([(40, 10), (25, 5)]), range(2))
    with torch.no_grad():
        full = train_forward(model, batch, 3, torch.float32)
        half = train_forward(model, batch, 3, torch.bfloat16)
    for a, b in zip(full, half, strict=True):
        assert torch.allclose(a.loss, b.loss, rtol=0.02)
