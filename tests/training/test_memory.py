"""What a step holds is computed as it is, and a step that does not fit is refused before it begins."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from speculators.models.eagle3 import Eagle3DraftModel

from eagle3_pipeline.errors import NotEnoughMemory
from eagle3_pipeline.target_weights import TargetWeights
from eagle3_pipeline.training import memory as module
from eagle3_pipeline.training import process
from eagle3_pipeline.training.batches import pack
from eagle3_pipeline.training.draft import FROZEN, layer_config, speculator_config, trained_parameters
from eagle3_pipeline.training.forward import train_forward
from eagle3_pipeline.training.loss import block_bytes
from eagle3_pipeline.training.memory import (
    MemoryPlan,
    Size,
    expected_bytes,
    free_bytes,
    planned_sizes,
    require_memory,
)
from eagle3_pipeline.training.norms import new_norms
from eagle3_pipeline.training.optimizer import Optimizer
from eagle3_pipeline.training.schedule import Schedule, StepBatches
from eagle3_pipeline.training.step_shape import StepShape
from tests.training.tiny import draft, memory, plan

_PAGE = Path(__file__).parents[2] / "docs" / "steps" / "draft-checkpoint.md"
_CPU = torch.device("cpu")
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
# Name, the target's config, draft tokens and tokens of a batch, as in the table of the page.
_TARGETS: list[tuple[str, dict[str, Any], int, int]] = [
    (
        "SmolLM2-135M",
        _LLAMA
        | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
        | {"intermediate_size": 1536, "vocab_size": 49152},
        4096,
        2048,
    ),
    (
        "Llama-3.1-8B",
        _LLAMA
        | {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        | {"intermediate_size": 14336, "vocab_size": 128256},
        32000,
        8192,
    ),
    (
        "Kimi-K2.5",
        {"model_type": "kimi_k2", "hidden_size": 7168, "num_attention_heads": 64}
        | {"intermediate_size": 18432, "vocab_size": 163840, "rms_norm_eps": 1e-5},
        32000,
        8192,
    ),
]


def _on_meta(target: dict[str, Any], draft_tokens: int) -> Any:
    """A new draft of the target without its numbers."""
    with torch.device("meta"):
        nothing = torch.empty(0)
        layer = layer_config(target, 3)
        model = Eagle3DraftModel(
            speculator_config(
                layer,
                TargetWeights(nothing, nothing, nothing, target, ()),
                target_name="somebody/large",
                aux_layers=(2, 5, 8),
                draft_tokens=draft_tokens,
                speculative_tokens=3,
                norms=new_norms(per_layer_norm=True, norm_output=False, norm_before_residual=True),
            )
        )
    for name, one in model.named_parameters():
        one.requires_grad_(name not in FROZEN)
    for part in (model.embed_tokens, model.verifier_lm_head):
        part.to(torch.bfloat16)
    return model


def _row(name: str, found: MemoryPlan, rows: int) -> str:
    parts = (found.weights, found.optimizer, found.gradients, found.frozen, found.activations, found.total)
    return f"| {name} | {rows:,} | " + " | ".join(f"{part / 2**30:.2f}" for part in parts) + " |"


@pytest.mark.parametrize(("name", "target", "tokens", "rows"), _TARGETS, ids=[one[0] for one in _TARGETS])
def test_the_page_says_what_known_targets_take(
    name: str, target: dict[str, Any], tokens: int, rows: int
) -> None:
    found = expected_bytes(_on_meta(target, tokens), rows=rows, steps=3, device="cuda")
    assert _row(name, found, rows) in _PAGE.read_text()


@pytest.mark.parametrize("loss", ["kl_div", "tv"])
@pytest.mark.parametrize("steps", [1, 3])
def test_what_a_pass_keeps_is_computed_within_a_tenth(loss: str, steps: int) -> None:
    model = draft(**new_norms(per_layer_norm=True, norm_output=False, norm_before_residual=True))
    for part in (model.embed_tokens, model.verifier_lm_head):
        part.to(torch.bfloat16)
    batch = pack(memory([(120, 4), (200, 4), (150, 4)]), range(3))
    rows, supervised = len(batch.tokens), len(batch.supervised)
    kept: list[weakref.ref[torch.Tensor]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(weakref.ref(tensor))  # what a block of the loss saves for itself goes with it
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = train_forward(model, batch, steps, loss=loss)
    storages = [one.untyped_storage() for one in (reference() for reference in kept) if one is not None]
    sizes = {one.data_ptr(): one.nbytes() for one in storages}
    lasting = {one.untyped_storage().data_ptr() for one in model.parameters()}
    found = sum(size for place, size in sizes.items() if place not in lasting)
    shape = StepShape(model)
    # Not saved by autograd: the verifier's part, projections of the embeddings, gradients of the casts, and
    # what the backward begins with.
    verifier = supervised * model.config.draft_vocab_size * (4 if loss == "kl_div" else 2)
    embeds = 2 * rows * (shape.queries + 2 * shape.keys)
    begun = 2 * supervised * (4 * shape.inner + 3 * shape.hidden)
    expected = shape.pass_(rows, supervised, steps, loss) - verifier - embeds - shape.casts - begun
    assert len(results) == steps
    assert expected == pytest.approx(found, rel=0.1)


def test_parts_and_gradients_that_stay_add_up() -> None:
    model = draft()
    once = expected_bytes(model, rows=100, steps=3)
    stays = expected_bytes(model, rows=100, steps=3, accumulation=2)
    assert once.total == once.lasting + max(once.gradients, once.activations)
    assert stays.total == once.lasting + once.gradients + once.activations
    assert expected_bytes(model, rows=100, steps=3, pulled=True).optimizer == 1.5 * once.optimizer
    assert expected_bytes(model, rows=100, steps=3, optimizer="muon").optimizer < once.optimizer
    assert expected_bytes(model, rows=50, steps=3).activations < once.activations


def test_several_processes_keep_gradients_in_buckets_and_those_of_earlier_batches_beside_them() -> None:
    model = draft()
    alone = expected_bytes(model, rows=100, steps=3)
    pair = expected_bytes(model, rows=100, steps=3, processes=2)
    accumulating = expected_bytes(model, rows=100, steps=3, processes=2, accumulation=2)
    assert pair.lasting == accumulating.lasting == alone.lasting + alone.gradients
    assert pair.total == pair.lasting + pair.activations
    assert accumulating.total == pair.total + alone.gradients
    assert "buckets" in pair.in_words()
    assert "buckets" not in alone.in_words()


def test_processes_on_one_machine_share_what_is_left_beside_their_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = draft()
    wanted = expected_bytes(model, rows=100, steps=3, processes=3)
    left = 3 * (wanted.total - wanted.weights - wanted.frozen)
    monkeypatch.setattr(module, "free_bytes", lambda device: left)
    assert require_memory(model, plan(tmp_path, processes=3), [Size(100, 100, 100)], _CPU) == wanted
    left -= 3
    with pytest.raises(NotEnoughMemory):
        require_memory(model, plan(tmp_path, processes=3), [Size(100, 100, 100)], _CPU)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_state_of_the_optimizer_is_as_large_as_it_is_computed(tmp_path: Path, kind: str) -> None:
    model = draft()
    parameters = trained_parameters(model)
    optimizer = Optimizer(parameters, plan(tmp_path, optimizer=kind))
    for one in parameters.values():
        one.grad = torch.ones_like(one)
    optimizer.step(1.0)
    state = [one for one in optimizer.tensors().values() if one.ndim]  # without counts of steps
    assert expected_bytes(model, rows=9, steps=3, optimizer=kind).optimizer == 4 * sum(
        map(torch.numel, state)
    )


def test_only_rows_that_are_supervised_take_logits_and_a_block_is_counted_by_device() -> None:
    model = draft()
    few, all_of_them = (
        expected_bytes(model, rows=4096, supervised=many, longest=0, steps=3) for many in (512, 4096)
    )
    assert few.activations < all_of_them.activations / 2
    tokens = model.config.draft_vocab_size
    assert block_bytes(4096 * tokens, "cuda") == 12 * 4096 * tokens
    assert block_bytes(1 << 40, "cuda") == 3 * (256 << 20)
    assert block_bytes(1 << 40, "cpu") == 3 * (2 << 20)


def test_a_turn_has_the_sizes_of_its_planned_batches() -> None:
    source = memory([(11, 4), (21, 10), (31, 1)])
    epochs: dict[int, list[StepBatches]] = {0: [((0, 1), (2,))], 1: [((1, 0),), ((2,),)]}
    sizes = planned_sizes(source, Schedule(epochs, (), (0, 1, 3), 40))
    assert sizes == {Size(30, 6 + 10, 20), Size(30, 29, 30)}


def test_a_step_that_does_not_fit_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda device: 1 << 10)
    sizes = [Size(40, 5, 30), Size(40, 20, 10)]
    with pytest.raises(
        NotEnoughMemory,
        match=r"batch of 40 rows, 20 of them supervised.*training\.accumulation: its batches are",
    ):
        require_memory(draft(), plan(tmp_path), sizes, _CPU)
    with pytest.raises(NotEnoughMemory, match=r"one sample, of 90 rows.*max_sample_tokens"):
        require_memory(draft(), plan(tmp_path, accumulation=2), [*sizes, Size(90, 80, 90)], _CPU)


def test_a_step_that_fits_by_its_supervised_rows_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = draft()
    fits = expected_bytes(model, rows=4000, supervised=100, longest=40, steps=3)
    assert fits.total < expected_bytes(model, rows=4000, longest=40, steps=3).total
    free = fits.total - fits.weights - fits.frozen
    monkeypatch.setattr(module, "free_bytes", lambda device: free)
    assert require_memory(model, plan(tmp_path), [Size(4000, 100, 40)], _CPU) == fits


def test_a_step_that_fits_is_logged_with_its_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    wanted = require_memory(draft(), plan(tmp_path), [Size(30, 20, 20)], _CPU)
    assert wanted.total < free_bytes(_CPU)
    assert "a step holds up to" in caplog.text
    assert "batch of 30 rows" in caplog.text


def test_memory_that_ends_in_a_step_all_the_same_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: Any) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(process, "_train", ends)
    with pytest.raises(
        NotEnoughMemory, match=r"2\.00 GiB.*tokens_per_step \(now 40\).*training\.accumulation \(now 2\)"
    ):
        process.run_plan(plan(tmp_path, accumulation=2))
