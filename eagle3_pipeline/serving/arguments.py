"""The arguments of a vLLM server, from settings alone, in vLLM's spelling.

Expert parallelism over 8 GPUs is `--tensor-parallel-size 8 --enable-expert-parallel` or, with whole copies
of the attention layers, `--data-parallel-size 8 --enable-expert-parallel`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.model_folder import language_part
from eagle3_pipeline.recipe.extras import FLAG_OF_SETTING, flag_in
from eagle3_pipeline.recipe.server import ServerSettings

CONNECTOR_CLASS = "HiddenStatesConnector"
CONNECTOR_MODULE = "eagle3_pipeline.extraction.connector"
_COMPILATION = "--compilation-config"
_NATIVE_ROPE = "-rotary_embedding"


def server_arguments(
    settings: ServerSettings, model: Path, flags: Sequence[str], *, trust_remote_code: bool
) -> tuple[str, ...]:
    """What follows the Python, up to name and port: settings, the phase's `flags`, the recipe's own.

    What is not set is left to vLLM.
    """
    trust = ("--trust-remote-code",) if trust_remote_code else ()
    return (
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"),
        *trust,
        *_flags_of(settings),
        "--disable-uvicorn-access-log",  # a line per request would push out what a person looks for
        *flags,
        *settings.extra_args,
    )


def _flags_of(settings: ServerSettings) -> list[str]:
    given: list[str] = []
    for name, flag in FLAG_OF_SETTING.items():
        value = getattr(settings, name)
        if value is True:
            given.append(flag)
        elif value is not None and value is not False:
            given += [flag, str(value)]
    return given


def extraction_flags(layers: Sequence[int], staging: Path) -> tuple[str, ...]:
    """Capture the states of `layers` into `staging`: the flags of vLLM's own example, with our connector.

    With prefix caching, tokens that are not computed again would have no states.
    """
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    transfer = {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(staging.absolute())},
    }
    return (
        *("--speculative_config", json.dumps(speculative)),
        *("--kv_transfer_config", json.dumps(transfer)),
        "--no-enable-prefix-caching",
    )


def rope_flags(settings: ServerSettings, config: Mapping[str, Any], phase: str) -> tuple[str, ...]:
    """Of a server on the CPU: rotary positions by torch instead of vLLM's kernel, for a target with MLA.

    MLA hands that kernel views with gaps, and it reads them as if they had none (csrc/cpu/pos_encoding.cpp
    in vLLM 0.32): most tokens are rotated by another token's position, without an error, so states, replies
    and acceptance are wrong. Compiled models do not use the kernel, and neither do those with scaled
    positions (Kimi-K2, DeepSeek-V3), to which the flag makes no difference.

    Raises RecipeError where the recipe has a flag of its own in whose place this one would be.
    """
    if language_part(config).get("kv_lora_rank") is None or not settings.enforce_eager:
        return ()
    if any(flag_in(argument, (_COMPILATION,)) for argument in settings.extra_args):
        if any(_NATIVE_ROPE in argument for argument in settings.extra_args):
            return ()
        raise RecipeError(
            f'server.{phase}.extra_args has {_COMPILATION}, but without custom_ops: ["{_NATIVE_ROPE}"] a '
            "target with MLA computes wrong states on the CPU. Add that to its value, or leave the flag out."
        )
    return (_COMPILATION, json.dumps({"custom_ops": [_NATIVE_ROPE]}))


def speculation_flags(draft: Path, tokens: int) -> tuple[str, ...]:
    """Speculate with the EAGLE-3 draft in a folder, `tokens` at a time."""
    speculative = {"method": "eagle3", "model": str(draft.absolute()), "num_speculative_tokens": tokens}
    return ("--speculative_config", json.dumps(speculative))
