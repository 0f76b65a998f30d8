"""Our pass over a packed batch gives the numbers of speculators' own forward, for all its variants."""

from typing import Any, get_args

import pytest
import speculators.models.eagle3.core as reference_core
import speculators.models.eagle3.metrics as reference
import torch
from speculators.losses import resolve_loss_config

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.recipe.training import LossName
from eagle3_pipeline.training.batches import Batch, pack
from eagle3_pipeline.training.draft import layer_config, new_draft, speculator_config
from eagle3_pipeline.training.forward import train_forward
from eagle3_pipeline.training.norms import new_norms
from tests.training.tiny import DRAFT, HIDDEN, LAYERS, draft, draft_map, memory, target_weights

_DECAY = 0.8
_VARIANTS = [
    {},
    {"norm_before_residual": True, "norm_output": True},
    {"fc_norm": True},
    {"norm_before_fc": True},
    new_norms(per_layer_norm=True, norm_output=False, norm_before_residual=True),
    new_norms(per_layer_norm=True, norm_output=True, norm_before_residual=True),
]
_NAMES = ["plain", "residual and output", "fc each", "fc whole", "new", "new, output"]


def _gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def _reference_loss(
    model: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch, name: str = "kl_div"
) -> torch.Tensor:
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
    if model.uses_sliding_window_attn:
        _move_window_on(model.sliding_window, monkeypatch)
    _, loss, _ = model(
        batch.states[None].float(),
        batch.tokens[None],
        documents[None],
        loss_mask=mask[None],
        position_ids=positions[None],
        verifier_last_hidden_states=verifier[None].float(),
        ttt_steps=3,
        ttt_step_loss_decay=_DECAY,
        loss_config=resolve_loss_config(name, "eager"),
    )
    return loss  # type: ignore[no-any-return]


def _move_window_on(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the chain to the window, as vLLM does: step k no longer sees context row r + k - window."""
    extend = reference_core.extend_dense_mask_for_draft_tokens

    def extend_and_move_on(mask: torch.Tensor, rows: int) -> torch.Tensor:
        step = mask.shape[-1] // rows
        queries = torch.arange(rows)[max(0, window - step) :]
        extended = extend(mask, rows)
        extended[..., queries, queries + step - window] = False
        return extended

    monkeypatch.setattr(reference_core, "extend_dense_mask_for_draft_tokens", extend_and_move_on)


def _require_same(
    model: Any, monkeypatch: pytest.MonkeyPatch, name: str = "kl_div", batch: Batch | None = None
) -> None:
    batch = batch or pack(memory([(23, 7), (11, 4), (30, 12)]), range(3))
    steps = train_forward(model, batch, 3, torch.float32, name)
    loss = torch.stack([_DECAY**k * step.mean for k, step in enumerate(steps)]).sum()
    ours = _gradients(model, loss)
    expected = _reference_loss(model, batch, monkeypatch, name)
    theirs = _gradients(model, expected)
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, atol=1e-5 * float(gradient.abs().max())), name


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("norms", _VARIANTS, ids=_NAMES)
def test_loss_and_every_gradient_are_those_of_speculators(
    kind: str, norms: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    _require_same(draft(kind, **norms), monkeypatch)


@pytest.mark.parametrize("name", get_args(LossName))
def test_each_loss_and_its_gradients_are_those_of_speculators(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _require_same(draft(), monkeypatch, name)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("window", [4, 9, 100])
def test_in_a_window_loss_and_gradients_are_those_of_speculators(
    kind: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = draft(kind, window=window)
    assert model.uses_sliding_window_attn
    _require_same(model, monkeypatch)


def test_rows_of_several_runs_in_one_sample_are_those_of_speculators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = memory([(23, 7), (40, 12)])
    source.samples[1]["loss_mask"][20:25] = False
    _require_same(draft(), monkeypatch, batch=pack(source, range(2)))


def test_a_layer_with_biases_is_that_of_speculators(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = target_weights()
    layer = layer_config(weights.config, 3)
    layer.attention_bias = True
    config = speculator_config(
        layer,
        weights,
        target_name="somebody/tiny",
        aux_layers=LAYERS[:-1],
        draft_tokens=DRAFT,
        speculative_tokens=3,
    )
    model = new_draft(config, weights, *draft_map(), seed=0, train_head=True)
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        torch.nn.init.normal_(getattr(model.layers[0].self_attn, projection).bias)
    _require_same(model, monkeypatch)


def test_a_window_that_the_speculated_tokens_would_fill_is_refused() -> None:
    with pytest.raises(BadInput, match=r"looks back 3 tokens and speculates 3.*attention_window"):
        draft(window=3)


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
