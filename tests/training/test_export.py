"""What is exported is read back the same by speculators, with everything explicit that serving depends on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.training.batches import pack
from eagle3_pipeline.training.draft import attention_window
from eagle3_pipeline.training.export import EXPLICIT, export_draft, export_tensors
from eagle3_pipeline.training.forward import train_forward
from eagle3_pipeline.vocabulary.mapping import verify_mapping
from tests.training.tiny import HIDDEN, LAYERS, VOCAB, draft, memory


def test_speculators_reads_every_tensor_back_and_proposes_the_same(tmp_path: Path) -> None:
    model = draft()
    export_draft(model, tmp_path / "draft", LAYERS[:-1])
    config = Eagle3SpeculatorConfig.from_pretrained(tmp_path / "draft")
    assert config.speculators_config.verifier.name_or_path == "somebody/tiny"
    config.transformer_layer_config._attn_implementation = "sdpa"
    again = Eagle3DraftModel(config)
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    missing, strange = again.load_state_dict(tensors, strict=False)
    assert sorted(missing) == ["verifier_lm_head.weight", "verifier_norm.weight"]
    assert not strange
    written = export_tensors(model)
    read = {name: one for name, one in again.state_dict().items() if not name.startswith("verifier_")}
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name].to(one.dtype), one) for name, one in written.items())
    model.load_state_dict(written, strict=False)  # in the precision that is served
    again.verifier_lm_head, again.verifier_norm = model.verifier_lm_head, model.verifier_norm
    batch = pack(memory([(40, 10)]), [0])
    with torch.no_grad():
        ours, theirs = train_forward(model, batch, 3), train_forward(again, batch, 3)
    assert all(torch.equal(a.proposals, b.proposals) for a, b in zip(ours, theirs, strict=True))


def test_the_config_says_all_that_acceptance_depends_on(tmp_path: Path) -> None:
    export_draft(draft(norm_before_residual=True), tmp_path / "draft", LAYERS[:-1])
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert {name: config[name] for name in EXPLICIT} == {
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS[:-1]),
    }
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_aux_hidden_states"]) == ("llama", 3)
    assert layer["rope_parameters"]["rope_theta"] == 10000.0
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_window_and_another_mlp_are_in_the_config_where_vllm_looks(tmp_path: Path, kind: str) -> None:
    # 4,096 is the default of a Qwen3 config, and a default is easily left out of a file.
    export_draft(draft(kind, window=4096, intermediate_size=64), tmp_path / "draft", LAYERS[:-1])
    layer = json.loads((tmp_path / "draft" / "config.json").read_text())["transformer_layer_config"]
    assert (layer["layer_types"], layer["sliding_window"]) == (["sliding_attention"], 4096)
    assert layer["intermediate_size"] == 64
    config = Eagle3SpeculatorConfig.from_pretrained(tmp_path / "draft")
    assert attention_window(config.transformer_layer_config) == 4096
    again = Eagle3DraftModel(config)
    assert (again.sliding_window, again.uses_full_attn) == (4096, False)
    assert again.layers[0].mlp.up_proj.out_features == 64


def test_floats_are_bfloat16_and_the_vocabulary_map_is_whole(tmp_path: Path) -> None:
    files = export_draft(draft(), tmp_path / "draft", LAYERS[:-1])
    assert [path.name for path in files] == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    verify_mapping(tensors["d2t"], tensors["t2d"], VOCAB)
    floats = {one.dtype for name, one in tensors.items() if name not in ("d2t", "t2d")}
    assert floats == {torch.bfloat16}


def test_what_is_bfloat16_already_is_written_without_a_copy(tmp_path: Path) -> None:
    model = draft()
    file = torch.arange(2 * VOCAB * HIDDEN).to(torch.bfloat16).view(2 * VOCAB, HIDDEN)
    embedding = torch.nn.Parameter(file[:VOCAB], requires_grad=False)  # as of a file with other tensors
    model.embed_tokens.weight = embedding
    assert export_tensors(model)["embed_tokens.weight"].data_ptr() == embedding.data_ptr()
    export_draft(model, tmp_path / "draft", LAYERS[:-1])
    assert torch.equal(load_file(tmp_path / "draft" / "model.safetensors")["embed_tokens.weight"], embedding)


def test_an_export_over_an_older_one_replaces_it_whole(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "old.bin").write_text("old")
    export_draft(draft(), tmp_path / "draft", LAYERS[:-1])
    assert not (tmp_path / "draft" / "old.bin").exists()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_are_not_exported(tmp_path: Path, number: float) -> None:
    model = draft()
    with torch.no_grad():
        model.fc.weight[3, 5] = number
    with pytest.raises(DamagedFile, match=r"fc\.weight of the trained draft is not finite"):
        export_draft(model, tmp_path / "draft", LAYERS[:-1])
    assert not (tmp_path / "draft").exists()


def test_a_config_that_names_other_layers_than_were_trained_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DamagedFile, match=r"config names the layers \[2, 5, 7\], it was trained on \[2, 5, 8\]"
    ):
        export_draft(draft(), tmp_path / "draft", (2, 5, 8))
    assert not (tmp_path / "draft").exists()


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    export_draft(draft(), tmp_path / "draft", LAYERS[:-1])
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "draft").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
