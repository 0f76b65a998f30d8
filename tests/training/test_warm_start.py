"""A base draft is renamed by rule and loaded whole, or refused with the list of what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.training.base_tensors import renamed
from eagle3_pipeline.training.batches import pack
from eagle3_pipeline.training.draft import new_draft, speculator_config
from eagle3_pipeline.training.export import export_draft
from eagle3_pipeline.training.forward import train_forward
from eagle3_pipeline.training.warm_start import load_base, read_base_config, require_base_fits
from eagle3_pipeline.vocabulary.base_mapping import read_base_mapping
from tests.training.tiny import DRAFT, HIDDEN, LAYERS, VOCAB, draft, draft_map, memory, target_weights

Tensors = dict[str, torch.Tensor]

_FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS[:-1])},
}


def _kept(model: Any) -> Tensors:
    state = model.state_dict().items()
    return {name: one.clone().contiguous() for name, one in state if not name.startswith("verifier_")}


def _authors(model: Any) -> Tensors:
    """As the EAGLE-3 authors' code and SpecForge name them, without the target's embedding."""
    kept = _kept(model)
    del kept["embed_tokens.weight"]
    return {name.replace("layers.0.", "midlayer."): one for name, one in kept.items()}


def _without_t2d(model: Any) -> Tensors:
    return {name: one for name, one in _authors(model).items() if name != "t2d"}


def _with_ids(model: Any) -> Tensors:
    """d2t holds the target's ids instead of offsets."""
    tensors = _authors(model)
    return {**tensors, "d2t": tensors["d2t"] + torch.arange(DRAFT)}


def _wrapped(model: Any) -> Tensors:
    """As some exports of whole models name them, with what the config gives anyway."""
    return {
        **{f"model.{name}": one for name, one in _kept(model).items()},
        "rotary_emb.inv_freq": torch.ones(4),
    }


def _write(folder: Path, tensors: Tensors, **config: Any) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**_FLAT, **config}))
    return folder


def _trained(**norms: bool) -> Any:
    model = draft(**norms)
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.mul_(1.1)
    return model


def _started_from(base: Path) -> Any:
    """The draft as training builds it from the base."""
    weights = target_weights()
    d2t, t2d = read_base_mapping(base, VOCAB)
    require_base_fits(base, weights.config, LAYERS[:-1], len(d2t))
    layer, norms = read_base_config(base, weights, LAYERS[:-1])
    config = speculator_config(
        layer,
        weights,
        target_name="t",
        aux_layers=LAYERS[:-1],
        draft_tokens=len(d2t),
        speculative_tokens=3,
        norms=norms,
    )
    model = new_draft(config, weights, d2t, t2d, seed=5, train_head=True)
    load_base(model, base)
    return model


def _require_same(before: Any, after: Any) -> None:
    batch = pack(memory([(40, 10)]), [0])
    steps = [train_forward(model, batch, 3, torch.float32) for model in (before, after)]
    assert torch.equal(before.d2t, after.d2t)
    assert all(torch.equal(a.loss, b.loss) for a, b in zip(*steps, strict=True))
    assert all(torch.equal(a.proposals, b.proposals) for a, b in zip(*steps, strict=True))


@pytest.mark.parametrize("layout", [_authors, _without_t2d, _with_ids, _wrapped])
def test_a_draft_of_another_layout_is_loaded_whole_and_proposes_what_it_proposed_before(
    tmp_path: Path, layout: Any
) -> None:
    trained = _trained()
    _require_same(trained, _started_from(_write(tmp_path, layout(trained))))


@pytest.mark.parametrize("norms", [{"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}])
def test_a_draft_that_was_exported_here_is_its_own_start(tmp_path: Path, norms: dict[str, bool]) -> None:
    trained = _trained(**norms)
    with torch.no_grad():
        for name, one in trained.named_parameters():
            if not name.startswith("verifier_"):
                one.copy_(one.to(torch.bfloat16))  # as it is exported
    export_draft(trained, tmp_path / "draft", LAYERS[:-1])
    _require_same(trained, _started_from(tmp_path / "draft"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        name: one.to(dtype) if one.is_floating_point() else one for name, one in _authors(_trained()).items()
    }
    model = _started_from(_write(tmp_path, tensors))
    assert model.fc.weight.dtype == torch.float32
    assert torch.equal(model.fc.weight, tensors["fc.weight"].float())


def test_a_draft_with_all_tokens_and_no_head_of_its_own_starts_with_the_targets(tmp_path: Path) -> None:
    tensors = _authors(_trained())
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    model = _started_from(_write(tmp_path, tensors, draft_vocab_size=VOCAB))
    assert torch.equal(model.lm_head.weight, target_weights().head)


def test_its_window_and_rope_are_kept(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    window = {"layer_types": ["sliding_attention"], "sliding_window": 7}
    base = _write(tmp_path, {}, rope_parameters=rope, **window)
    layer, _ = read_base_config(base, target_weights(), LAYERS[:-1])
    assert layer.layer_types == ["sliding_attention"]
    assert layer.sliding_window == 7
    assert layer.rope_parameters == rope


@pytest.mark.parametrize(("name", "size"), [("hidden_size", 2 * HIDDEN), ("vocab_size", 2 * VOCAB)])
@pytest.mark.parametrize("layout", ["exported", "flat"])
def test_a_whole_draft_of_a_target_of_another_size_is_refused_by_its_config(
    tmp_path: Path, name: str, size: int, layout: str
) -> None:
    if layout == "exported":
        export_draft(draft(), tmp_path / "draft", LAYERS[:-1])
    else:
        (tmp_path / "draft").mkdir()
        _write(tmp_path / "draft", _authors(draft()))
    target = {**target_weights().config, name: size}
    with pytest.raises(BadInput, match=rf"has {name} {size // 2}, the target {size}.*of another target"):
        require_base_fits(tmp_path / "draft", target, LAYERS[:-1], DRAFT)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": "wide"},
        {"hidden_size": HIDDEN, "num_attention_heads": 3, "head_dim": None},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}},
        {"layer_types": ["sliding_attention"], "sliding_window": "long"},
    ],
)
def test_a_layer_that_cannot_be_built_is_refused_by_its_config(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    with pytest.raises(BadInput, match=r"config\.json describes no layer that can be built"):
        read_base_config(_write(tmp_path, {}, **config), target_weights(), LAYERS[:-1])


def test_what_is_missing_unknown_or_of_another_shape_is_refused_with_the_list(tmp_path: Path) -> None:
    tensors = _authors(draft())
    del tensors["midlayer.hidden_norm.weight"]
    tensors["midlayer.extra.weight"] = torch.zeros(3)
    tensors["fc.weight"] = torch.zeros(32, 64)
    base = _write(tmp_path, tensors)
    for refused in (
        lambda: load_base(draft(), base),
        lambda: require_base_fits(base, target_weights().config, LAYERS[:-1], DRAFT),
    ):
        with pytest.raises(BadInput) as refusal:
            refused()
        for part in (
            "layers.0.hidden_norm.weight",
            "midlayer.extra.weight",
            "fc.weight [32, 64] for [32, 96]",
        ):
            assert part in str(refusal.value)


def test_two_tensors_for_one_name_are_refused(tmp_path: Path) -> None:
    tensors = _authors(draft())
    tensors["layers.0.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"].clone()
    with pytest.raises(BadInput, match=r"two tensors for layers\.0\.mlp\.up_proj\.weight"):
        load_base(draft(), _write(tmp_path, tensors))


def test_a_quantized_draft_is_refused(tmp_path: Path) -> None:
    tensors = {**_authors(draft()), "fc.weight": torch.zeros(32, 96, dtype=torch.int8)}
    with pytest.raises(BadInput, match=r"has fc\.weight as I8, expected one of BF16, F16, F32"):
        load_base(draft(), _write(tmp_path, tensors))


def test_a_file_that_is_cut_is_refused_by_name(tmp_path: Path) -> None:
    base = _write(tmp_path, _authors(draft()))
    whole = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(BadInput, match=r"model\.safetensors cannot be read"):
        load_base(draft(), base)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("model.midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.fc.weight", "fc.weight"),
    ],
)
def test_names_of_other_projects_are_renamed_by_rule(name: str, expected: str) -> None:
    assert renamed(name) == expected


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    weights = target_weights()
    layer = draft().config.transformer_layer_config
    layer.vocab_size = VOCAB + 1
    config = speculator_config(
        layer, weights, target_name="t", aux_layers=(1, 2, 3), draft_tokens=DRAFT, speculative_tokens=3
    )
    with pytest.raises(BadInput, match="of another target"):
        new_draft(config, weights, *draft_map(), seed=0, train_head=True)
