"""What this project knows of vLLM's command line, held against the parser of the installed vLLM."""

from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.recipe.extras import _NO_ABBREVIATIONS, _NOT_IN_EXTRACTION, _OURS, _SHORT, flag_in
from eagle3_pipeline.recipe.server import ServerSettings
from eagle3_pipeline.serving.arguments import extraction_flags, server_arguments


@pytest.fixture(scope="module")
def parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.real
def test_every_flag_that_is_refused_is_one_and_no_other_begins_like_it(parser: Any) -> None:
    actions = parser._option_string_actions
    assert {*_OURS, *_NOT_IN_EXTRACTION, *_SHORT, *_NO_ABBREVIATIONS} - set(actions) == set()
    assert {short: actions[short] for short in _SHORT} == {
        short: actions[flag] for short, flag in _SHORT.items()
    }
    for refused in (_OURS, _NOT_IN_EXTRACTION):
        of_refused = [actions[flag] for flag in refused]
        taken_for_one = {flag for flag in actions if flag_in(flag, refused) is not None}
        assert {flag for flag in taken_for_one if actions[flag] not in of_refused} == set()


@pytest.mark.real
def test_vllm_reads_the_arguments_as_they_are_meant(parser: Any, tmp_path: Path) -> None:
    values = {
        "max_model_len": 12288,
        "tensor_parallel": 2,
        "pipeline_parallel": 3,
        "data_parallel": 4,
        "expert_parallel": True,
        "quantization": "fp8",
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 64,
        "reasoning_parser": "kimi_k2",
        "enforce_eager": True,
        "extra_args": ["--seed", "1"],
    }
    settings = ServerSettings.model_validate(values)
    flags = extraction_flags((1, 2), tmp_path)
    argv = server_arguments(settings, tmp_path, flags, trust_remote_code=True)
    found = parser.parse_args([*argv[2:], "--served-model-name", "x", "--port", "8000"])
    assert found.max_model_len == 12288
    sizes = (found.tensor_parallel_size, found.pipeline_parallel_size, found.data_parallel_size)
    assert sizes == (2, 3, 4)
    assert found.enable_expert_parallel is found.enforce_eager is found.trust_remote_code is True
    assert (found.quantization, found.dtype, found.gpu_memory_utilization) == ("fp8", "bfloat16", 0.5)
    assert (found.max_num_seqs, found.reasoning_parser, found.seed) == (64, "kimi_k2", 1)
    assert found.enable_prefix_caching is False
    assert found.speculative_config["method"] == "extract_hidden_states"
    assert found.kv_transfer_config.kv_connector == "HiddenStatesConnector"
    assert (found.model, found.served_model_name, found.host) == (str(tmp_path), ["x"], "127.0.0.1")
