"""Which splits of which targets are refused before a server starts, and with which valid values."""

from typing import Any

import pytest

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.recipe.server import ServerSettings
from eagle3_pipeline.serving.parallelism import check_parallel

# The numbers that matter here, as the config.json of each has them.
LLAMA_8B: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3", "original_max_position_embeddings": 8192},
}
SMOLLM2: dict[str, Any] = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
QWEN3_30B: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "moe_intermediate_size": 768,
    "num_experts": 128,
}
KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "vision_config": {"vt_num_attention_heads": 16},
    "text_config": {
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "num_hidden_layers": 61,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    },
}


def check(config: dict[str, Any], phase: str = "generation", **settings: Any) -> None:
    check_parallel(ServerSettings.model_validate(settings), config, phase)


def refusal(config: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(RecipeError) as refused:
        check(config, **settings)
    return str(refused.value)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA_8B, {}),
        (LLAMA_8B, {"tensor_parallel": 8, "pipeline_parallel": 4, "max_model_len": 131072}),
        (LLAMA_8B, {"tensor_parallel": 16}),  # each of 8 key/value heads twice
        (LLAMA_8B, {"data_parallel": 3}),
        (SMOLLM2, {"tensor_parallel": 3, "pipeline_parallel": 30}),
        (QWEN3_30B, {"tensor_parallel": 8, "expert_parallel": True}),
        (QWEN3_30B, {"tensor_parallel": 2, "data_parallel": 4, "expert_parallel": True}),
        (KIMI, {"tensor_parallel": 8, "expert_parallel": True, "max_model_len": 12288}),
        (KIMI, {"data_parallel": 8, "expert_parallel": True}),
        (KIMI, {"tensor_parallel": 4, "data_parallel": 6, "expert_parallel": True}),
        ({}, {"tensor_parallel": 7, "max_model_len": 10**9}),  # a config that does not say is not judged
    ],
)
def test_what_vllm_serves_is_not_refused(config: dict[str, Any], settings: dict[str, Any]) -> None:
    check(config, **settings)


def test_attention_heads_must_divide_and_the_valid_sizes_are_named() -> None:
    assert refusal(SMOLLM2, tensor_parallel=2) == (
        "server.generation.tensor_parallel is 2, over which 9 attention heads cannot be split evenly. "
        "Valid values for this target: 1, 3."
    )


def test_nine_heads_do_not_fit_nine_ranks_when_the_vocabulary_does_not() -> None:
    # 49152 = 3 x 2^14: the heads alone would allow 9.
    assert "a vocabulary of 49152 (filled up to 49152)" in refusal(SMOLLM2, tensor_parallel=9)


def test_key_value_heads_are_split_or_copied_evenly() -> None:
    config = {"num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 64 * 24}
    assert "8 key/value heads" in refusal(config, tensor_parallel=3)
    assert refusal(config, tensor_parallel=12).endswith("Valid values for this target: 1, 2, 4, 8, 24.")


def test_mla_has_no_key_value_heads_to_split() -> None:
    config = {"num_attention_heads": 12, "num_key_value_heads": 8, "kv_lora_rank": 512, "vocab_size": 64 * 3}
    check(config, tensor_parallel=3)


def test_a_vocabulary_is_filled_up_to_blocks_of_64_before_it_is_split() -> None:
    config = {"num_attention_heads": 40, "vocab_size": 151_936}
    check({**config, "vocab_size": 151_930}, tensor_parallel=8)
    assert "a vocabulary of 151936 (filled up to 151936)" in refusal(config, tensor_parallel=5)


def test_the_language_model_of_a_multimodal_target_is_judged() -> None:
    assert "64 attention heads" in refusal(KIMI, tensor_parallel=6, data_parallel=64, expert_parallel=True)


@pytest.mark.parametrize(("tensor", "data"), [(5, 1), (1, 5), (5, 2)])
def test_experts_must_spread_evenly_over_tensor_times_data_ranks(tensor: int, data: int) -> None:
    config = {"num_experts": 64, "num_attention_heads": 40}
    assert refusal(config, tensor_parallel=tensor, data_parallel=data, expert_parallel=True) == (
        f"server.generation: 64 experts cannot be spread evenly over {tensor * data} ranks (tensor_parallel "
        "x data_parallel). Valid numbers of ranks for this target: 2, 4, 8, 16, 32, 64; or leave "
        "expert_parallel out, which splits each expert."
    )


def test_stages_share_no_experts() -> None:
    check({"num_experts": 64}, tensor_parallel=2, pipeline_parallel=3, expert_parallel=True)


def test_redundant_experts_are_left_to_vllm() -> None:
    flags = ["--enable-eplb", "--eplb_config.num_redundant_experts=4"]
    check({"num_experts": 60}, tensor_parallel=8, expert_parallel=True, extra_args=flags)


def test_more_ranks_than_experts_are_refused() -> None:
    assert "8 experts" in refusal({"num_local_experts": 8}, data_parallel=16, expert_parallel=True)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA_8B,
        {"num_experts": 0},
        {"num_local_experts": None},
        {"text_config": LLAMA_8B},
        {"num_experts": []},
    ],
)
def test_a_dense_target_has_no_experts_to_spread(config: dict[str, Any]) -> None:
    assert refusal(config, tensor_parallel=2, expert_parallel=True) == (
        "server.generation.expert_parallel is set, but the target is dense: its config.json names no experts "
        "(num_experts, moe_num_experts, n_routed_experts, num_local_experts). Valid value: false."
    )


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 8},
        {"moe_num_experts": [8, 8]},
        {"n_routed_experts": 8},
        {"num_local_experts": 8},
        {"num_experts": None, "block_configs": [{"block_type": "moe", "n_routed_experts": 8}, {}]},
    ],
)
def test_experts_are_known_by_any_name_that_vllm_knows(config: dict[str, Any]) -> None:
    check(config, tensor_parallel=4, expert_parallel=True)
    assert "8 experts" in refusal(config, tensor_parallel=3, expert_parallel=True)


def test_without_expert_parallel_each_expert_is_split_over_tensor_times_data_ranks() -> None:
    config = {"num_attention_heads": 32, "moe_intermediate_size": 48, "num_experts": 8}
    check(config, tensor_parallel=16)
    check(config, tensor_parallel=32, expert_parallel=True, extra_args=["--eplb-config", "{}"])
    assert "experts of width 48 (without expert_parallel)" in refusal(config, tensor_parallel=32)
    message = refusal(config, tensor_parallel=16, data_parallel=2)
    assert "experts of width 48 (without expert_parallel, with data_parallel 2)" in message
    assert message.endswith("Valid values for this target: 1, 2, 4, 8.")
    # 5 copies of the attention never divide the width, however it is split.
    assert refusal(config, data_parallel=5).endswith("Valid values for this target: none.")


def test_there_are_no_more_stages_than_layers() -> None:
    assert refusal(SMOLLM2, pipeline_parallel=31) == (
        "server.generation.pipeline_parallel is 31, more than the target's 30 layers: use at most 30."
    )


def test_a_sequence_is_no_longer_than_the_context() -> None:
    assert refusal(SMOLLM2, max_model_len=8193) == (
        "server.generation.max_model_len is 8193, more than the target's context of 8192 tokens: "
        "use at most 8192, or leave it out."
    )


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 4000),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 2000),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 4000),
        ({"rope_parameters": {"full": {"rope_type": "linear", "factor": 8.0}, "sliding": {}}}, 8000),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 1000),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, 1000),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, 1000),
        ({"rope_scaling": None}, 1000),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, 1000),
        ({"seq_length": 500}, 500),
        ({"model_max_length": 5000}, 5000),
    ],
)
def test_the_context_is_the_one_that_vllm_derives(config: dict[str, Any], longest: int) -> None:
    config = {"max_position_embeddings": 1000, **config}
    check(config, max_model_len=longest)
    assert f"context of {longest} tokens" in refusal(config, max_model_len=longest + 1)


def test_a_longer_sequence_may_be_forced_as_vllm_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check(SMOLLM2, max_model_len=9000, extra_env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "true")
    check(SMOLLM2, max_model_len=9000)


@pytest.mark.parametrize("flags", [["--hf-overrides", "{}"], ["--hf_overrides.rope_scaling.factor=4"]])
def test_a_config_that_vllm_is_told_to_see_otherwise_is_not_judged(flags: list[str]) -> None:
    check(SMOLLM2, max_model_len=9000, extra_args=flags)


def test_the_phase_is_named() -> None:
    with pytest.raises(RecipeError, match=r"^server\.extraction\.tensor_parallel is 2"):
        check(SMOLLM2, "extraction", tensor_parallel=2)
