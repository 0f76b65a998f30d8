"""The layout of the EAGLE-3 authors: the same draft bit for bit to every reader, or refused with a reason."""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from speculators.convert import convert_model
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import LlamaConfig

from eagle3_pipeline import tensor_file
from eagle3_pipeline.errors import DamagedFile, MissingInput, NotEnoughRoom
from eagle3_pipeline.release.draft_tensors import draft_shapes
from eagle3_pipeline.release.eagle3_layout import eagle3_config, write_eagle3_layout
from eagle3_pipeline.release.expected import Expected
from eagle3_pipeline.training.base_config import aux_layers, read_config
from eagle3_pipeline.training.batches import pack
from eagle3_pipeline.training.draft import new_draft, speculator_config
from eagle3_pipeline.training.export import export_draft, export_tensors
from eagle3_pipeline.training.forward import train_forward
from eagle3_pipeline.training.warm_start import load_base, read_base_config, require_base_fits
from eagle3_pipeline.vocabulary.base_mapping import read_base_mapping
from tests.release.published import NAMES, PublishedDraft
from tests.training.tiny import DRAFT, HIDDEN, LAYERS, VOCAB, draft, memory, target_config, target_weights

VERIFIER = "somebody/tiny"
_IDS = "eagle_aux_hidden_state_layer_ids"
_EMBEDDING = "embed_tokens.weight"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The folder of the invented target."""
    folder, weights = tmp_path / "target", target_weights()
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], **target_config()}
    (folder / "config.json").write_text(json.dumps(config))
    names = {"model.embed_tokens": weights.embedding, "lm_head": weights.head, "model.norm": weights.norm}
    save_file({f"{name}.weight": one for name, one in names.items()}, folder / "model.safetensors")
    return folder


def exported(folder: Path, model: Any = None) -> Path:
    """The draft as training exports it, to which every parameter was given a value of its own."""
    model = model or draft()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.requires_grad:
                one.add_(torch.randn(one.shape, generator=generator) * 0.1)
            if name == "fc.weight":
                one.mul_(3)  # so that a norm in the wrong place shows
    export_draft(model, folder / "draft", LAYERS[:-1])
    return folder / "draft"


@pytest.fixture
def layout(tmp_path: Path, target: Path) -> Path:
    """The draft in the authors' layout; the folder beside it is `draft`."""
    files = write_eagle3_layout(exported(tmp_path), target, tmp_path / "eagle3", VERIFIER)
    assert files == [tmp_path / "eagle3" / "config.json", tmp_path / "eagle3" / "model.safetensors"]
    return tmp_path / "eagle3"


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype
        and torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8))
        for name, tensor in one.items()
    )


def ours(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder in this project's names, without the embedding."""
    return {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name != _EMBEDDING
    }


def test_every_tensor_has_the_authors_name_and_the_drafts_bits(layout: Path) -> None:
    tensors = load_file(layout / "model.safetensors")
    assert set(tensors) == NAMES
    assert {tensors[name].dtype for name in NAMES - {"d2t", "t2d"}} == {torch.bfloat16}
    assert same(ours(layout), ours(layout.parent / "draft"))


def test_the_config_is_flat_and_says_everything(layout: Path) -> None:
    config = json.loads((layout / "config.json").read_text())
    layer = json.loads((layout.parent / "draft" / "config.json").read_text())["transformer_layer_config"]
    assert {name: config[name] for name in layer} == layer
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["verifier"] == VERIFIER
    assert (config["draft_vocab_size"], config["vocab_size"]) == (DRAFT, VOCAB)
    assert config["eagle_config"] == {_IDS: [1, 4, 6], "use_aux_hidden_state": True}
    assert config[_IDS] == [2, 5, 7]
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[flag] for flag in flags] == [False] * 4
    assert (config["rope_theta"], config["rope_scaling"]) == (10000.0, None)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert "speculators_config" not in config  # vLLM would read another layout


def test_a_reader_written_from_the_published_code_proposes_what_training_proposed(layout: Path) -> None:
    model = Eagle3DraftModel(_config(layout.parent / "draft"))
    tensors = load_file(layout.parent / "draft" / "model.safetensors")
    model.load_state_dict(tensors, strict=False)
    weights = target_weights()
    model.verifier_lm_head.weight.data = weights.head[tensors["t2d"]]
    model.verifier_norm.weight.data = weights.norm
    batch = pack(memory([(60, 10)]), [0])
    with torch.no_grad():
        step = train_forward(model, batch, 1, torch.float32)[0]
    trained = step.proposals + tensors["d2t"][step.proposals]
    reader = PublishedDraft(layout, weights.embedding.to(torch.bfloat16))
    found = reader.proposals(batch.states, batch.tokens)[batch.supervised]
    assert len(found) > 40
    assert torch.equal(found, trained)
    assert len(found.unique()) > 5


def _config(folder: Path) -> Any:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return config


def test_speculators_converts_it_back_to_the_same_draft(layout: Path, target: Path, tmp_path: Path) -> None:
    convert_model(
        str(layout),
        verifier=str(target),
        algorithm="eagle3",
        output_path=str(tmp_path / "back"),
        eagle_aux_hidden_state_layer_ids=[2, 5, 7],
    )
    assert same(ours(tmp_path / "back"), ours(layout))
    found, trained = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "back", layout.parent / "draft")
    )
    for name in ("draft_vocab_size", "target_hidden_size", _IDS, "norm_before_residual", "fc_norm"):
        assert found[name] == trained[name], name
    settings = ("rope_parameters", "head_dim", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    for name in (*settings, "hidden_size", "intermediate_size", "vocab_size", "model_type"):
        assert found["transformer_layer_config"][name] == trained["transformer_layer_config"][name], name


def test_this_projects_warm_start_reads_it_as_the_draft_it_was(layout: Path, target: Path) -> None:
    weights = target_weights()
    layers = aux_layers(layout, read_config(layout), LAYERS[-1], "auto")
    d2t, t2d = read_base_mapping(layout, VOCAB)
    require_base_fits(layout, weights.config, layers, len(d2t))
    layer, norms = read_base_config(layout, weights, layers)
    config = speculator_config(
        layer,
        weights,
        target_name=VERIFIER,
        aux_layers=layers,
        draft_tokens=len(d2t),
        speculative_tokens=3,
        norms=norms,
    )
    model = new_draft(config, weights, d2t, t2d, seed=5, train_head=True)
    load_base(model, layout)
    assert same(export_tensors(model), load_file(layout.parent / "draft" / "model.safetensors"))
    before = json.loads((layout.parent / "draft" / "config.json").read_text())
    export_draft(model, layout.parent / "again", layers)
    again = json.loads((layout.parent / "again" / "config.json").read_text())
    assert again == before


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 64.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_both_spellings_of_rotary_settings_mean_the_same(rope: dict[str, Any]) -> None:
    layer = LlamaConfig(rope_parameters=dict(rope), max_position_embeddings=262144).to_dict()
    draft_config = {"transformer_layer_config": layer, "draft_vocab_size": 8, "target_hidden_size": 4096}
    config = eagle3_config({**draft_config, _IDS: [2, 5, 7]}, VERIFIER)
    new = {name: one for name, one in config.items() if name not in ("rope_theta", "rope_scaling")}
    old = {name: one for name, one in config.items() if name != "rope_parameters"}
    for spelling in (new, old, config):
        assert (
            LlamaConfig.from_dict(json.loads(json.dumps(spelling))).rope_parameters
            == layer["rope_parameters"]
        )
    assert config["rope_theta"] == rope["rope_theta"]
    assert "rope_theta" not in (config["rope_scaling"] or {})


def test_a_draft_of_the_whole_vocabulary_has_no_map(tmp_path: Path, target: Path) -> None:
    weights = target_weights()
    made = speculator_config(
        draft().config.transformer_layer_config,
        weights,
        target_name=VERIFIER,
        aux_layers=LAYERS[:-1],
        draft_tokens=VOCAB,
        speculative_tokens=3,
    )
    whole = torch.zeros(VOCAB, dtype=torch.int64), torch.ones(VOCAB, dtype=torch.bool)
    model = new_draft(made, weights, *whole, seed=0, train_head=True)
    assert not isinstance(
        write_eagle3_layout(exported(tmp_path, model), target, tmp_path / "e", VERIFIER), str
    )
    assert set(load_file(tmp_path / "e" / "model.safetensors")) == NAMES - {"d2t", "t2d"}
    assert torch.equal(read_base_mapping(tmp_path / "e", VOCAB)[0], whole[0])


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: draft(norm_before_residual=True), "adds to the normed state"),
        (lambda: draft(norm_before_fc=True), "the joined states are normed"),
        (lambda: draft(fc_norm=True), "the state of each layer is normed"),
        (lambda: draft(norm_output=True), "output is fed back normed"),
        (lambda: draft(window=16), "the draft looks back 16 tokens"),
        (lambda: draft("qwen3"), "layer is of the kind qwen3"),
    ],
    ids=["residual", "joined", "each", "output", "window", "qwen3"],
)
def test_what_the_layout_cannot_express_is_refused_with_the_reason(
    tmp_path: Path, target: Path, model: Any, reason: str
) -> None:
    why = write_eagle3_layout(exported(tmp_path, model()), target, tmp_path / "eagle3", VERIFIER)
    assert isinstance(why, str)
    assert reason in why
    assert not (tmp_path / "eagle3").exists()


def _changed(draft: Path, **config: Any) -> Path:
    path = draft / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return draft


def _with(draft: Path, name: str, tensor: torch.Tensor) -> Path:
    weights = draft / "model.safetensors"
    save_file({**load_file(weights), name: tensor}, draft / "changed")
    (draft / "changed").replace(weights)  # what is mapped is never written over
    return draft


def test_every_reason_is_said_at_once(tmp_path: Path, target: Path) -> None:
    made = _changed(
        exported(tmp_path, draft(fc_norm=True, norm_before_residual=True)), **{_IDS: [1, 2, 5, 7]}
    )
    why = write_eagle3_layout(made, target, tmp_path / "eagle3", VERIFIER)
    for reason in ("normed state", "state of each layer", "draws on 4 layers", "[1, 2, 5, 7]"):
        assert reason in why


def test_a_tensor_without_a_place_in_the_layout_is_refused(tmp_path: Path, target: Path) -> None:
    bias = torch.ones(HIDDEN, dtype=torch.bfloat16)
    made = _with(exported(tmp_path), "layers.0.self_attn.o_proj.bias", bias)
    why = write_eagle3_layout(made, target, tmp_path / "eagle3", VERIFIER)
    assert why == "the draft has tensors for which the layout has no place: layers.0.self_attn.o_proj.bias"


def test_an_embedding_of_its_own_is_refused(tmp_path: Path, target: Path) -> None:
    made = _with(exported(tmp_path), _EMBEDDING, target_weights().embedding.to(torch.bfloat16) + 1)
    why = write_eagle3_layout(made, target, tmp_path / "eagle3", VERIFIER)
    assert why == "the draft's embedding is not the target's, and SGLang and SpecForge take the target's"


def _by_sglang(config: dict[str, Any], depth: int) -> list[Sequence[int]]:
    """What older and newer versions of SGLang capture, by what enters a layer (pull request 25454)."""
    ids = config["eagle_config"][_IDS]
    return [[one + 1 for one in ids], [one + 1 for one in ids] if ids[0] == 1 else ids]


def _by_vllm(config: dict[str, Any], depth: int) -> list[Sequence[int]]:
    """Both runners look beside the rest first (v1/worker/gpu_model_runner.py)."""
    return [config.get(_IDS) or config["eagle_config"][_IDS]]


def _by_specforge(config: dict[str, Any], depth: int) -> list[Sequence[int]]:
    """Outputs of these layers (modeling/target/eagle3_target_model.py)."""
    return [[one + 1 for one in config["eagle_config"][_IDS]]]


def _by_warm_start(config: dict[str, Any], depth: int) -> list[Sequence[int]]:
    nested = {name: one for name, one in config.items() if name != _IDS}
    return [aux_layers(Path(), one, depth, "auto") for one in (config, nested)]


@given(st.lists(st.integers(3, 60), min_size=2, max_size=2, unique=True).map(sorted), st.integers(61, 80))
@settings(deadline=None)
def test_c37_every_reader_takes_the_layers_that_were_trained_on(ids: list[int], depth: int) -> None:
    trained = [2, *ids]
    layer = {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}
    draft_config = {"transformer_layer_config": layer, "draft_vocab_size": 8, "target_hidden_size": 8}
    config = eagle3_config({**draft_config, _IDS: trained}, VERIFIER)
    for reader in (_by_sglang, _by_vllm, _by_specforge, _by_warm_start):
        assert all(list(found) == trained for found in reader(config, depth)), reader.__name__


@pytest.mark.parametrize("ids", [[1, 5, 7], [3, 5, 7]])
def test_c37_layers_that_versions_of_sglang_count_in_two_ways_are_refused(
    tmp_path: Path, target: Path, ids: list[int]
) -> None:
    made = _changed(exported(tmp_path), **{_IDS: ids})
    why = write_eagle3_layout(made, target, tmp_path / "eagle3", VERIFIER)
    assert f"the draft draws on what enters the layers {ids}" in why


def test_what_a_kill_left_is_written_over(tmp_path: Path, target: Path) -> None:
    made = exported(tmp_path)
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / "model.safetensors").write_bytes(b"half a file")
    files = write_eagle3_layout(made, target, tmp_path / "eagle3", VERIFIER)
    assert sorted((tmp_path / "eagle3").iterdir()) == files
    assert same(ours(tmp_path / "eagle3"), ours(made))


def test_a_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path, metadata: Any = None) -> None:
        path.write_bytes(b"as far as it went")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(tensor_file, "write_tensors", full)
    with pytest.raises(NotEnoughRoom, match="materialise released_draft again"):
        write_eagle3_layout(exported(tmp_path / "made"), target, tmp_path / "eagle3", VERIFIER)
    assert not (tmp_path / "eagle3").exists()


def test_what_the_disk_does_not_give_back_is_refused(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = exported(tmp_path)
    written = tensor_file.write_tensors

    def flipped(tensors: dict[str, torch.Tensor], path: Path, metadata: Any = None) -> None:
        written({**tensors, "fc.weight": -tensors["fc.weight"]}, path, metadata)

    monkeypatch.setattr(tensor_file, "write_tensors", flipped)
    with pytest.raises(DamagedFile, match="is not what was written"):
        write_eagle3_layout(made, target, tmp_path / "eagle3", VERIFIER)
    assert not (tmp_path / "eagle3").exists()


def test_without_the_target_no_layout_is_written(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="Materialise target_model again"):
        write_eagle3_layout(exported(tmp_path), tmp_path / "gone", tmp_path / "eagle3", VERIFIER)


_KINDS = [
    ("llama", {}),
    ("qwen3", {}),
    ("llama", {"norm_before_fc": True, "norm_output": True}),
    ("qwen3", {"fc_norm": True, "norm_before_residual": True}),
]


@pytest.mark.parametrize(("kind", "norms"), _KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_shapes_that_are_expected_are_those_of_speculators_draft(
    tmp_path: Path, kind: str, norms: dict[str, bool], bias: bool
) -> None:
    model = draft(kind, **norms)
    if bias:
        model.config.transformer_layer_config.attention_bias = True
        model = Eagle3DraftModel(model.config)
    config = {
        **norms,
        "transformer_layer_config": model.config.transformer_layer_config.to_dict(),
    }
    rest = {"norms": norms, "window": None, "layer": {}, "rope": {}, "target": tmp_path, "special_ids": {}}
    expected = Expected(
        hidden_size=model.config.target_hidden_size,
        vocab_size=VOCAB,
        architecture="",
        verifier="",
        aux_layers=LAYERS[:-1],
        draft_tokens=DRAFT,
        **rest,
    )
    shapes = {
        name: list(one.shape) for name, one in model.state_dict().items() if not name.startswith("verifier_")
    }
    assert draft_shapes(config, expected) == shapes
