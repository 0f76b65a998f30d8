"""What may go to vLLM beside the settings: an argument that a setting stands for is known in any spelling."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from eagle3_pipeline.recipe.extras import (
    _NOT_IN_EXTRACTION,
    _OURS,
    _SHORT,
    FLAG_OF_SETTING,
    check_arguments,
    check_environment,
    check_extraction_arguments,
    flag_in,
)
from eagle3_pipeline.recipe.server import Servers, ServerSettings

ORDINARY = (
    *(
        "--seed",
        "1",
        "--max-num-batched-tokens=256",
        "--reasoning-parser-plugin",
        "p.py",
        "-O3",
        "-cc.mode=3",
    ),
    *("--quantization-config", '{"a": 1}', "--data-parallel-backend", "mp", "--model-impl=vllm", "-n", "1"),
    *("--compilation-config.mode", "3", "--no-enable-prefix-caching", "--hf-overrides", '{"model": "x"}'),
    *("--config-format", "hf", "--max-logprobs", "-1", "--tokenizer", "a/model", "-dpb", "mp", "-dc", "{}"),
    *("--chat-template", "{{ '-tp 2 --model' }}", "--enable-eplb", "--grpc-port", "5", "-", ""),
)


@st.composite
def _spellings(draw: st.DrawFn, flags: dict[str, str]) -> tuple[str, list[str]]:
    flag = draw(st.sampled_from(sorted(flags)))
    name = flag[: draw(st.integers(min_value=3, max_value=len(flag)))]
    name = "--" + "".join(draw(st.sampled_from("-_")) if one == "-" else one for one in name[2:])
    tail = draw(st.sampled_from([["=1"], ["", "1"], [".model", "x"], [".a.b+=c"], [" 1"]]))
    return flag, [name + tail[0], *tail[1:]]


@given(_spellings(_OURS))
def test_what_the_pipeline_sets_is_refused_in_every_spelling_of_vllms_parser(
    case: tuple[str, list[str]],
) -> None:
    flag, arguments = case
    assert flag_in(arguments[0], [flag]) == flag
    with pytest.raises(ValueError, match="is not for extra_args: "):
        check_arguments(["--seed", "1", *arguments])


@given(_spellings(_NOT_IN_EXTRACTION))
def test_what_makes_states_missing_is_refused_in_every_spelling(case: tuple[str, list[str]]) -> None:
    with pytest.raises(ValueError, match="is forbidden in extraction: "):
        check_extraction_arguments(case[1])


@pytest.mark.parametrize("short", sorted(_SHORT))
@pytest.mark.parametrize("tail", ["", "=2", ".model=x", " 2"])
def test_short_flags_are_known_too(short: str, tail: str) -> None:
    assert flag_in(short + tail, [_SHORT[short]]) == _SHORT[short]


@pytest.mark.parametrize(
    ("argument", "flag"),
    [("-t", "--tensor-parallel-size"), ("-s", "--speculative-config"), ("-qawq", "--quantization")],
)
def test_so_are_their_beginnings_and_values_without_a_blank(argument: str, flag: str) -> None:
    assert flag_in(argument, _OURS) == flag


def test_ordinary_arguments_and_their_values_pass() -> None:
    check_arguments(ORDINARY)
    check_extraction_arguments(ORDINARY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tensor_parallel_size=2"],
            r"^--tensor_parallel_size \(--tensor-parallel-size\) is not for extra_args: use the setting "
            "tensor_parallel$",
        ),
        (["-tp", "2"], r"^-tp \(--tensor-parallel-size\) is not for"),
        (["--max-model-len", "5"], r"^--max-model-len is not for extra_args: use the setting max_model_len$"),
        (
            ["--speculative-config.model", "x"],
            "the phase sets it, from extraction.layers or evaluation.specul",
        ),
        (["--served-model-name", "x"], "known by its name"),
        (["--trust_remote_code"], r"use target\.trust_remote_code"),
        (["--uds", "/tmp/x"], "at their port on the loopback address"),
        (["--config", "x.yaml"], "write its flags here"),
        (["--no-enforce-eager"], "use the setting enforce_eager"),
        (["--seed", "1", "--", "x"], "-- ends the flags"),
    ],
)
def test_a_refusal_names_what_to_use_instead(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_arguments(arguments)


@pytest.mark.parametrize("arguments", [["--api-key", "geheim"], ["--api_key=geheim"], ["--api-k=geheim"]])
def test_a_key_is_refused_and_never_shown(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="locks out our own requests") as refusal:
        check_arguments(arguments)
    assert "geheim" not in str(refusal.value)


def test_every_flag_of_a_setting_belongs_to_one_that_exists() -> None:
    assert set(FLAG_OF_SETTING) <= set(ServerSettings.model_fields)
    assert len(set(FLAG_OF_SETTING.values())) == len(FLAG_OF_SETTING)


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "VLLM_RPC_BASE_PATH", "CUDA_VISIBLE_DEVICES"])
def test_variables_that_the_pipeline_answers_for_are_refused_without_their_value(name: str) -> None:
    with pytest.raises(ValueError, match=f"extra_env has {name}: ") as refusal:
        check_environment({name: "geheim"}, 5)
    assert "geheim" not in str(refusal.value)


@pytest.mark.parametrize("limit", ["600", "3599", "1h", "", "3600.5", "-1"])
def test_an_inner_time_limit_below_the_outer_is_refused_and_the_setting_named(limit: str) -> None:
    with pytest.raises(ValueError, match=r"no fewer than start_timeout_s 3600: vLLM would give up first"):
        check_environment({"VLLM_ENGINE_READY_TIMEOUT_S": limit}, 3600)


def test_an_inner_time_limit_above_the_outer_may_stay() -> None:
    check_environment({"VLLM_ENGINE_READY_TIMEOUT_S": "3600", "NCCL_DEBUG": "INFO"}, 3600)


def test_generation_may_cache_prefixes_where_extraction_may_not() -> None:
    cached = {"extra_args": ["--enable-prefix-caching"]}
    Servers.model_validate({"generation": cached, "evaluation": cached})
    with pytest.raises(
        ValidationError, match=r"server\.extraction\.extra_args: --enable-prefix-caching is forb"
    ):
        Servers.model_validate({"common": cached})


@pytest.mark.parametrize(
    "block", [{"common": {"pipeline_parallel": 2}}, {"extraction": {"pipeline_parallel": 2}}]
)
def test_extraction_has_one_stage(block: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match=r"server\.extraction\.pipeline_parallel is 2, .*set it to 1 there"
    ):
        Servers.model_validate(block)
    Servers.model_validate({"common": {"pipeline_parallel": 2}, "extraction": {"pipeline_parallel": 1}})


@pytest.mark.parametrize("name", ["HF_TOKEN", "MY_PASSWORD", "SOME_API_KEY"])
def test_a_secret_is_no_part_of_a_recipe(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"extra_env has {name}: a recipe is shown .* holds no secret"
    ) as said:
        check_environment({name: "geheim", "A": "b"}, 900)
    assert "geheim" not in str(said.value)
