from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.release.verification import Expected, verify_draft
from tests.release.made import (
    DRAFT_TOKENS,
    HIDDEN,
    LAYERS,
    TARGET_NAME,
    VOCAB,
    draft_config,
    draft_tensors,
    write_draft,
)

EXPECTED = Expected(
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    architecture="LlamaForCausalLM",
    aux_layers=LAYERS[:-1],
    draft_tokens=DRAFT_TOKENS,
    verifier_names=frozenset({TARGET_NAME}),
)

Change = Callable[[dict[str, Any]], object]


def refusal(folder: Path, *, config: Change | None = None, tensors: Change | None = None) -> str:
    """What is said about a draft with one thing changed."""
    values, weights = draft_config(), draft_tensors()
    if config:
        config(values)
    if tensors:
        tensors(weights)
    with pytest.raises(DamagedFile) as error:
        verify_draft(write_draft(folder, values, weights), EXPECTED)
    return str(error.value)


def test_a_draft_as_speculators_saves_it_passes(tmp_path: Path) -> None:
    verify_draft(write_draft(tmp_path), EXPECTED)


def test_a_draft_without_embedding_uses_the_targets(tmp_path: Path) -> None:
    tensors = draft_tensors()
    del tensors["embed_tokens.weight"]
    verify_draft(write_draft(tmp_path, tensors=tensors), EXPECTED)


def test_a_folder_without_weights_is_no_draft(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"config\.json"):
        verify_draft(tmp_path, EXPECTED)


def test_c55_an_fc_of_another_width_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, tensors=lambda t: t.update({"fc.weight": torch.randn(HIDDEN, 4 * HIDDEN)}))
    assert f"fc.weight is [{HIDDEN}, {4 * HIDDEN}], expected [{HIDDEN}, {3 * HIDDEN}]" in said


def test_c55_empty_architectures_are_refused(tmp_path: Path) -> None:
    assert "architectures is empty" in refusal(tmp_path, config=lambda c: c.update(architectures=[]))


@pytest.mark.parametrize("path", ["/models/target", "/mnt/scratch/storage/target_model/0123/model", None])
def test_c55_a_verifier_recorded_as_a_path_is_refused(tmp_path: Path, path: str | None) -> None:
    said = refusal(tmp_path, config=lambda c: c["speculators_config"]["verifier"].update(name_or_path=path))
    assert f"verifier.name_or_path is {path}, expected {TARGET_NAME}" in said


def test_c55_a_verifier_of_another_architecture_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, config=lambda c: c["speculators_config"]["verifier"].update(architectures=[]))
    assert "verifier.architectures is []" in said


@pytest.mark.parametrize("layers", [None, [1, 2], [2, 3, 4], [3, 2, 1]])
def test_c56_other_aux_layers_than_were_trained_are_refused(tmp_path: Path, layers: list[int] | None) -> None:
    said = refusal(tmp_path, config=lambda c: c.update(eagle_aux_hidden_state_layer_ids=layers))
    assert f"eagle_aux_hidden_state_layer_ids is {layers}, expected [1, 2, 3]" in said


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_c56_a_norm_flag_that_vllm_would_guess_is_refused(tmp_path: Path, flag: str) -> None:
    assert f"config {flag} is None" in refusal(tmp_path, config=lambda c: c.pop(flag))


def test_c56_a_norm_that_the_config_switches_off_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, tensors=lambda t: t.update({"fc_norm.0.weight": torch.ones(HIDDEN)}))
    assert "fc_norm.* was trained, but config fc_norm is false" in said


def test_c56_a_norm_that_the_config_claims_but_was_not_trained_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, config=lambda c: c.update(norm_before_fc=True))
    assert f"input_norm.weight is missing, expected [{3 * HIDDEN}]" in said


def test_c56_a_config_without_rope_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, config=lambda c: c["transformer_layer_config"].pop("rope_parameters"))
    assert "no rope_theta" in said


def test_four_aux_layers_must_be_told_to_vllm(tmp_path: Path) -> None:
    four = Expected(**{**vars(EXPECTED), "aux_layers": (1, 2, 3, 4)})
    config, tensors = draft_config(), draft_tensors()
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3, 4]
    tensors["fc.weight"] = torch.randn(HIDDEN, 4 * HIDDEN)
    with pytest.raises(DamagedFile, match="num_aux_hidden_states is not 4: vLLM would assume 3"):
        verify_draft(write_draft(tmp_path, config, tensors), four)
    config["transformer_layer_config"]["num_aux_hidden_states"] = 4
    verify_draft(write_draft(tmp_path, config, tensors), four)


@pytest.mark.parametrize("gone", [["d2t"], ["t2d"], ["d2t", "t2d"]])
def test_c46_a_reduced_vocabulary_without_its_map_is_refused(tmp_path: Path, gone: list[str]) -> None:
    said = refusal(tmp_path, tensors=lambda t: [t.pop(name) for name in gone])
    assert f"{' and '.join(gone)} missing, although the draft has 8 of the target's 40 tokens" in said


def test_c41_a_map_of_token_ids_instead_of_offsets_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, tensors=lambda t: t.update(d2t=t["d2t"] + torch.arange(DRAFT_TOKENS)))
    assert "d2t holds offsets" in said


def test_c41_maps_that_disagree_are_refused(tmp_path: Path) -> None:
    assert "t2d has" in refusal(tmp_path, tensors=lambda t: t["t2d"].__setitem__(4, True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_found_anywhere(tmp_path: Path, value: float) -> None:
    said = refusal(tmp_path, tensors=lambda t: t["lm_head.weight"][-1].__setitem__(-1, value))
    assert "lm_head.weight has values that are not finite" in said


@pytest.mark.parametrize("name", ["fc.weight", "embed_tokens.weight", "norm.weight"])
def test_weights_that_were_never_filled_are_refused(tmp_path: Path, name: str) -> None:
    assert f"{name} is 0 everywhere" in refusal(tmp_path, tensors=lambda t: t[name].zero_())


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    folder = write_draft(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DamagedFile, match=r"model\.safetensors cannot be read"):
        verify_draft(folder, EXPECTED)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    said = refusal(
        tmp_path,
        config=lambda c: c.update(architectures=[], draft_vocab_size=9),
        tensors=lambda t: t.pop("norm.weight"),
    )
    assert "architectures" in said
    assert "draft_vocab_size is 9, expected 8" in said
    assert "norm.weight is missing" in said
