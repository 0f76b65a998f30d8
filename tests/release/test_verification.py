"""A draft is released only as it was trained; whatever else it is, is said with what was expected."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.release.expected import Expected
from eagle3_pipeline.release.verification import verify_draft
from tests.release.made import TARGET_NAME, made_lineage, make_checkpoint
from tests.release.tiny_draft import (
    DRAFT_IDS,
    DRAFT_TOKENS,
    HIDDEN,
    LAYERS,
    TARGET_CONFIG,
    VOCAB,
    draft_config,
    draft_tensors,
    target_tensors,
    write_draft,
    write_target,
)

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def expected(tmp_path: Path) -> Expected:
    """What the tiny draft was trained for."""
    return Expected(
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        architecture="LlamaForCausalLM",
        verifier=TARGET_NAME,
        special_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        aux_layers=LAYERS[:-1],
        draft_tokens=DRAFT_TOKENS,
        norms={"norm_before_residual": True, "norm_before_fc": False, "fc_norm": True, "norm_output": False},
        window=None,
        layer={"rms_norm_eps": 1e-6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
        rope={"rope_type": "default", "rope_theta": 10000.0},
        target=write_target(tmp_path / "target"),
    )


Refusal = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path, expected: Expected) -> Refusal:
    """What is said about the tiny draft with one thing changed."""

    def say(*, config: Change | None = None, tensors: Change | None = None, **trained: Any) -> str:
        values, weights = draft_config(TARGET_NAME), draft_tensors()
        if config:
            config(values)
        if tensors:
            tensors(weights)
        with pytest.raises(DamagedFile) as error:
            verify_draft(write_draft(tmp_path / "draft", values, weights), replace(expected, **trained))
        return str(error.value)

    return say


def _layer(**values: Any) -> Change:
    return lambda config: config["transformer_layer_config"].update(values)


def test_a_draft_as_training_exports_it_passes(tmp_path: Path, expected: Expected) -> None:
    verify_draft(write_draft(tmp_path / "draft", draft_config(TARGET_NAME), draft_tensors()), expected)


@pytest.mark.parametrize("base", [None, {"path": "/drafts/base"}], ids=["new", "from a base draft"])
def test_what_is_expected_follows_from_recipe_target_and_base_draft(
    tmp_path: Path, base: dict[str, str] | None
) -> None:
    lineage = made_lineage(tmp_path, base_draft=base)
    make_checkpoint(lineage)
    found = Expected.of(lineage)
    verify_draft(lineage.draft_checkpoint().folder / "draft", found)
    assert found.norms["fc_norm"] is found.norms["norm_before_residual"] is (base is None)
    assert (found.verifier, found.base) == (TARGET_NAME, lineage.base_draft_path())
    assert found.special_ids == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_a_new_draft_without_norms_of_its_own_is_of_the_authors_kind(tmp_path: Path) -> None:
    plain = {"norm_before_residual": False, "per_layer_norm": False}
    assert not any(Expected.of(made_lineage(tmp_path, training=plain)).norms.values())


@pytest.mark.parametrize("head", [{"train_head": False}, {"rates": {"head": 0.0}}])
def test_a_head_that_the_recipe_freezes_is_expected_to_be_the_targets(
    tmp_path: Path, head: dict[str, Any]
) -> None:
    lineage = made_lineage(tmp_path, training=head)
    make_checkpoint(lineage)
    assert not Expected.of(lineage).head_is_trained


def test_a_folder_without_weights_is_no_draft(tmp_path: Path, expected: Expected) -> None:
    with pytest.raises(MissingInput, match=r"config\.json"):
        verify_draft(tmp_path, expected)


def test_a_config_that_is_cut_is_refused(tmp_path: Path, expected: Expected) -> None:
    folder = write_draft(tmp_path / "draft", draft_config(TARGET_NAME), draft_tensors())
    (folder / "config.json").write_text("{")
    with pytest.raises(DamagedFile, match=r"config\.json is not JSON"):
        verify_draft(folder, expected)


def test_c55_an_fc_of_another_width_is_refused(refusal: Refusal) -> None:
    wide = torch.randn(HIDDEN, 4 * HIDDEN).to(torch.bfloat16)
    said = refusal(tensors=lambda t: t.update({"fc.weight": wide}))
    assert f"fc.weight is [{HIDDEN}, {4 * HIDDEN}], expected [{HIDDEN}, {3 * HIDDEN}]" in said


def test_c55_empty_architectures_are_refused(refusal: Refusal) -> None:
    assert "architectures is empty" in refusal(config=lambda c: c.update(architectures=[]))


@pytest.mark.parametrize("name", ["/models/target", "/mnt/scratch/target_model/0123/model", None, "a/other"])
def test_c55_a_verifier_that_is_another_one_or_a_path_is_refused(refusal: Refusal, name: str | None) -> None:
    said = refusal(config=lambda c: c["speculators_config"]["verifier"].update(name_or_path=name))
    assert f"verifier.name_or_path is {name}, expected {TARGET_NAME}" in said


def test_c55_a_verifier_of_another_architecture_is_refused(refusal: Refusal) -> None:
    said = refusal(config=lambda c: c["speculators_config"]["verifier"].update(architectures=[]))
    assert "verifier.architectures is []" in said


@pytest.mark.parametrize("layers", [None, [2, 3], [3, 4, 5], [4, 3, 2], [1, 2, 3]])
def test_c56_other_aux_layers_than_were_trained_are_refused(refusal: Refusal, layers: Any) -> None:
    said = refusal(config=lambda c: c.update(eagle_aux_hidden_state_layer_ids=layers))
    assert f"eagle_aux_hidden_state_layer_ids is {layers}, expected [2, 3, 4]" in said


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_c56_a_norm_flag_is_there_and_as_in_training(refusal: Refusal, expected: Expected, flag: str) -> None:
    trained = expected.norms[flag]
    assert f"config {flag} is None, it was trained with {trained}" in refusal(config=lambda c: c.pop(flag))
    said = refusal(config=lambda c: c.update({flag: not trained}))
    assert f"config {flag} is {not trained}, it was trained with {trained}" in said


def test_c56_a_norm_that_the_config_switches_off_is_refused(refusal: Refusal) -> None:
    said = refusal(config=lambda c: c.update(fc_norm=False))
    assert "fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight: no part of the draft" in said


def test_c56_a_norm_that_the_config_claims_but_was_not_trained_is_refused(refusal: Refusal) -> None:
    said = refusal(config=lambda c: c.update(norm_before_fc=True))
    assert f"input_norm.weight is missing, expected [{3 * HIDDEN}]" in said


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (None, "rope_parameters.rope_theta is None, it was trained with 10000.0"),
        ({"rope_type": "default", "rope_theta": 500000.0}, "rope_theta is 500000.0"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, "rope_type is linear"),
    ],
)
def test_c56_other_rotary_settings_than_in_training_are_refused(
    refusal: Refusal, rope: Any, words: str
) -> None:
    assert words in refusal(config=_layer(rope_parameters=rope))


def test_c56_a_window_that_was_not_trained_with_is_refused(refusal: Refusal) -> None:
    said = refusal(config=_layer(layer_types=["sliding_attention"], sliding_window=512))
    assert "has a window of 512, it was trained with None" in said
    assert "has a window of None, it was trained with 512" in refusal(window=512)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rms_norm_eps", 1e-5), ("num_attention_heads", 4), ("num_hidden_layers", 2), ("vocab_size", 41)],
)
def test_c56_a_layer_that_is_described_otherwise_is_refused(refusal: Refusal, name: str, value: Any) -> None:
    said = refusal(config=_layer(**{name: value}))
    assert f"config transformer_layer_config.{name} is {value}, expected" in said


def test_c56_a_layer_that_vllm_does_not_serve_is_refused(refusal: Refusal) -> None:
    assert "model_type is gemma, vLLM serves" in refusal(config=_layer(model_type="gemma"))


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_special_ids_of_another_tokenizer_are_refused(refusal: Refusal, name: str) -> None:
    right = TARGET_CONFIG[name]
    assert f"config transformer_layer_config.{name} is 7, the target's is {right}" in refusal(
        config=_layer(**{name: 7})
    )


def test_four_aux_layers_must_be_told_to_vllm(tmp_path: Path, expected: Expected) -> None:
    four = replace(expected, aux_layers=(2, 3, 4, 5))
    config, tensors = draft_config(TARGET_NAME), draft_tensors()
    config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 4, 5]
    del config["transformer_layer_config"]["num_aux_hidden_states"]
    tensors["fc.weight"] = torch.randn(HIDDEN, 4 * HIDDEN).to(torch.bfloat16)
    tensors["fc_norm.3.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(DamagedFile, match="vLLM takes for 3: the draft draws on 4 layers"):
        verify_draft(write_draft(tmp_path / "draft", config, tensors), four)
    config["transformer_layer_config"]["num_aux_hidden_states"] = 4
    verify_draft(write_draft(tmp_path / "draft", config, tensors), four)


def test_four_aux_layers_where_three_are_served_are_refused(refusal: Refusal) -> None:
    def fourth(tensors: dict[str, Any]) -> None:
        tensors["fc.weight"] = torch.randn(HIDDEN, 4 * HIDDEN).to(torch.bfloat16)
        tensors["fc_norm.3.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)

    said = refusal(config=lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 3, 4, 5]), tensors=fourth)
    assert "eagle_aux_hidden_state_layer_ids is [2, 3, 4, 5], expected [2, 3, 4]" in said
    assert f"fc.weight is [{HIDDEN}, {4 * HIDDEN}]" in said
    assert "fc_norm.3.weight: no part of the draft" in said


@pytest.mark.parametrize("gone", [["d2t"], ["t2d"], ["d2t", "t2d"]])
def test_c46_a_reduced_vocabulary_without_its_map_is_refused(refusal: Refusal, gone: list[str]) -> None:
    said = refusal(tensors=lambda t: [t.pop(name) for name in gone])
    assert f"{' and '.join(gone)} missing, although the draft has 8 of the target's 40 tokens" in said


def test_a_map_beside_the_whole_vocabulary_is_refused(refusal: Refusal) -> None:
    def whole(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN).to(torch.bfloat16)
        tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.int64)
        tensors["t2d"] = torch.ones(VOCAB, dtype=torch.bool)

    said = refusal(config=lambda c: c.update(draft_vocab_size=VOCAB), tensors=whole, draft_tokens=VOCAB)
    assert "d2t, t2d: no part of the draft" in said


@pytest.mark.parametrize("size", [VOCAB - 1, VOCAB + 8])
def test_a_draft_of_another_vocabulary_is_refused(refusal: Refusal, size: int) -> None:
    def other(tensors: dict[str, Any]) -> None:
        tensors["embed_tokens.weight"] = torch.randn(size, HIDDEN).to(torch.bfloat16)
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool)

    said = refusal(config=_layer(vocab_size=size), tensors=other)
    assert f"vocab_size is {size}, expected {VOCAB}" in said
    assert f"embed_tokens.weight is [{size}, {HIDDEN}], expected [{VOCAB}, {HIDDEN}]" in said
    assert f"t2d is torch.bool [{size}], expected bool [{VOCAB}]" in said


def test_c41_a_map_of_token_ids_instead_of_offsets_is_refused(refusal: Refusal) -> None:
    said = refusal(tensors=lambda t: t.update(d2t=t["d2t"] + torch.arange(DRAFT_TOKENS)))
    assert "d2t holds offsets" in said


def test_c41_maps_that_disagree_are_refused(refusal: Refusal) -> None:
    assert "t2d has" in refusal(tensors=lambda t: t["t2d"].__setitem__(4, True))


def test_a_map_of_another_shape_is_refused(refusal: Refusal) -> None:
    said = refusal(tensors=lambda t: t.update(d2t=t["d2t"].view(2, 4)))
    assert f"d2t is [2, 4], expected [{DRAFT_TOKENS}]" in said


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.v_proj.weight", "norm.weight", "layers.0.mlp.up_proj.weight"]
)
def test_every_part_of_the_draft_has_its_tensor(refusal: Refusal, name: str) -> None:
    assert f"{name} is missing, expected [" in refusal(tensors=lambda t: t.pop(name))


@pytest.mark.parametrize(
    "name", ["midlayer.hidden_norm.weight", "layers.1.hidden_norm.weight", "verifier_norm"]
)
def test_no_tensor_is_without_a_part_of_the_draft(refusal: Refusal, name: str) -> None:
    said = refusal(tensors=lambda t: t.update({name: torch.ones(HIDDEN, dtype=torch.bfloat16)}))
    assert f"{name}: no part of the draft that the config describes" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_of_another_precision_are_refused(refusal: Refusal, dtype: torch.dtype) -> None:
    said = refusal(tensors=lambda t: t.update({"fc.weight": t["fc.weight"].to(dtype)}))
    assert "fc.weight is of type F" in said
    assert "expected BF16" in said


def test_a_map_of_another_type_is_refused(refusal: Refusal) -> None:
    said = refusal(tensors=lambda t: t.update(d2t=t["d2t"].to(torch.int32), t2d=t["t2d"].to(torch.uint8)))
    assert "d2t is of type I32, expected I64" in said
    assert "t2d is of type U8, expected BOOL" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_found_anywhere(refusal: Refusal, value: float) -> None:
    said = refusal(tensors=lambda t: t["lm_head.weight"][-1].__setitem__(-1, value))
    assert "lm_head.weight has values that are not finite" in said


@pytest.mark.parametrize("name", ["fc.weight", "embed_tokens.weight", "norm.weight"])
def test_weights_that_were_never_filled_are_refused(refusal: Refusal, name: str) -> None:
    assert f"{name} is 0 everywhere" in refusal(tensors=lambda t: t[name].zero_())


def test_truncated_weights_are_refused(tmp_path: Path, expected: Expected) -> None:
    folder = write_draft(tmp_path / "draft", draft_config(TARGET_NAME), draft_tensors())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DamagedFile, match=r"model\.safetensors cannot be read"):
        verify_draft(folder, expected)


def test_one_tensor_in_two_files_is_refused(tmp_path: Path, expected: Expected) -> None:
    folder = write_draft(tmp_path / "draft", draft_config(TARGET_NAME), draft_tensors())
    save_file({"norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}, folder / "more.safetensors")
    with pytest.raises(DamagedFile, match=r"norm\.weight is in more\.safetensors and in another file"):
        verify_draft(folder, expected)


@pytest.mark.parametrize("row", [0, VOCAB - 1])
def test_an_embedding_that_is_not_the_targets_is_of_another_target(refusal: Refusal, row: int) -> None:
    said = refusal(tensors=lambda t: t["embed_tokens.weight"][row].neg_())
    assert f"embed_tokens.weight is not the target's (they differ at token {row})" in said


def test_a_draft_without_embedding_uses_the_targets(tmp_path: Path, expected: Expected) -> None:
    tensors = draft_tensors()
    del tensors["embed_tokens.weight"]
    verify_draft(write_draft(tmp_path / "draft", draft_config(TARGET_NAME), tensors), expected)


def test_an_embedding_in_the_targets_own_precision_is_the_same_in_bfloat16(
    tmp_path: Path, expected: Expected
) -> None:
    exact = {name: one.float() * (1 + 2**-12) for name, one in target_tensors().items()}
    tensors = draft_tensors()
    tensors["embed_tokens.weight"] = exact["model.embed_tokens.weight"].to(torch.bfloat16)
    write_target(expected.target, exact)
    verify_draft(write_draft(tmp_path / "draft", draft_config(TARGET_NAME), tensors), expected)


def test_a_frozen_head_is_the_targets_rows_of_the_drafts_tokens(
    tmp_path: Path, expected: Expected, refusal: Refusal
) -> None:
    frozen, tensors = replace(expected, head_is_trained=False), draft_tensors()
    tensors["lm_head.weight"] = target_tensors()["lm_head.weight"][list(DRAFT_IDS)]
    verify_draft(write_draft(tmp_path / "draft", draft_config(TARGET_NAME), tensors), frozen)
    said = refusal(head_is_trained=False)
    assert "lm_head.weight is not the target's (they differ at row 0), and was not to be trained" in said


def test_what_a_base_draft_has_of_its_own_is_the_base_drafts(
    tmp_path: Path, expected: Expected, refusal: Refusal
) -> None:
    config, tensors = draft_config(TARGET_NAME), draft_tensors()
    tensors["embed_tokens.weight"].neg_()
    base = write_draft(tmp_path / "base", config, tensors)
    from_base = replace(expected, base=base, head_is_trained=False)
    verify_draft(write_draft(tmp_path / "draft", config, tensors), from_base)
    said = refusal(base=base, tensors=lambda t: t["lm_head.weight"][3].neg_(), head_is_trained=False)
    assert "embed_tokens.weight is not the base draft's (they differ at token 0)" in said
    assert "lm_head.weight is not the base draft's (they differ at row 3)" in said


def test_without_the_target_nothing_is_said_to_be_right(tmp_path: Path, expected: Expected) -> None:
    (expected.target / "model.safetensors").unlink()
    with pytest.raises(MissingInput, match="is not there any more, or not whole"):
        verify_draft(write_draft(tmp_path / "draft", draft_config(TARGET_NAME), draft_tensors()), expected)


def test_a_config_that_describes_no_layer_is_refused_before_shapes_are(refusal: Refusal) -> None:
    said = refusal(config=lambda c: c.update(transformer_layer_config={}))
    assert "does not say hidden_size, intermediate_size, num_attention_heads" in said


def test_all_that_is_wrong_is_said_at_once(refusal: Refusal) -> None:
    said = refusal(
        config=lambda c: c.update(architectures=[], draft_vocab_size=9),
        tensors=lambda t: t.pop("norm.weight"),
    )
    assert "architectures" in said
    assert "draft_vocab_size is 9, expected 8" in said
    assert "norm.weight is missing" in said
