"""A base draft is renamed by rule and loaded whole, or refused with the list of what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.training.batches import pack
from eagle3_pipeline.training.draft import new_draft, speculator_config
from eagle3_pipeline.training.forward import train_forward
from eagle3_pipeline.training.warm_start import load_base, read_base_config, renamed
from tests.training.tiny import DRAFT, LAYERS, VOCAB, draft, draft_map, memory, target_weights


def _foreign(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a draft under the names of the EAGLE-3 authors' code, without the target's embedding."""
    kept = {name: one.clone() for name, one in model.state_dict().items() if not name.startswith("verifier_")}
    del kept["embed_tokens.weight"]
    return {name.replace("layers.0.", "midlayer."): one.contiguous() for name, one in kept.items()}


def _write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    save_file(tensors, folder / "model.safetensors")
    shape = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
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
    (folder / "config.json").write_text(json.dumps({**shape, **config}))
    return folder


def _trained() -> Any:
    model = draft()
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.mul_(1.1)
    return model


def test_a_foreign_draft_is_loaded_whole_and_proposes_what_it_proposed_before(tmp_path: Path) -> None:
    trained = _trained()
    base = _write(tmp_path, _foreign(trained))
    weights = target_weights()
    layer, norms = read_base_config(base, weights, LAYERS[:-1])
    config = speculator_config(
        layer,
        weights,
        target_name="t",
        aux_layers=LAYERS[:-1],
        draft_tokens=DRAFT,
        speculative_tokens=3,
        norms=norms,
    )
    model = new_draft(config, weights, *draft_map(), seed=5, train_head=True)
    load_base(model, base)
    batch = pack(memory([(40, 10)]), [0])
    before, after = (train_forward(one, batch, 3, torch.float32) for one in (trained, model))
    assert all(torch.equal(a.loss, b.loss) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(a.proposals, b.proposals) for a, b in zip(before, after, strict=True))


def test_what_is_missing_unknown_or_of_another_shape_is_refused_with_the_list(tmp_path: Path) -> None:
    tensors = _foreign(draft())
    del tensors["midlayer.hidden_norm.weight"]
    tensors["midlayer.extra.weight"] = torch.zeros(3)
    tensors["fc.weight"] = torch.zeros(32, 64)
    base = _write(tmp_path, tensors)
    with pytest.raises(BadInput) as refusal:
        load_base(draft(), base)
    for part in ("layers.0.hidden_norm.weight", "layers.0.extra.weight", "fc.weight [32, 64] for [32, 96]"):
        assert part in str(refusal.value)


def test_two_tensors_for_one_name_are_refused(tmp_path: Path) -> None:
    tensors = _foreign(draft())
    tensors["layers.0.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"].clone()
    with pytest.raises(BadInput, match=r"two tensors for layers\.0\.mlp\.up_proj\.weight"):
        load_base(draft(), _write(tmp_path, tensors))


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


def test_a_base_draft_of_other_layers_is_refused_with_the_layers_to_set(tmp_path: Path) -> None:
    base = _write(tmp_path, {}, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    with pytest.raises(BadInput, match=r"draws on the layers \[1, 2, 3\].*set it to \[1, 2, 3, 9\]"):
        read_base_config(base, target_weights(), LAYERS[:-1])


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    weights = target_weights()
    layer = draft().config.transformer_layer_config
    layer.vocab_size = VOCAB + 1
    config = speculator_config(
        layer, weights, target_name="t", aux_layers=(1, 2, 3), draft_tokens=DRAFT, speculative_tokens=3
    )
    with pytest.raises(BadInput, match="of another target"):
        new_draft(config, weights, *draft_map(), seed=0, train_head=True)
