"""The arguments of a vLLM server, from settings alone, in vLLM's spelling.

Expert parallelism over 8 GPUs is `--tensor-parallel-size 8 --enable-expert-parallel` or, with whole copies
of the attention layers, `--data-parallel-size 8 --enable-expert-parallel`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from eagle3_pipeline.recipe.extras import FLAG_OF_SETTING
from eagle3_pipeline.recipe.server import ServerSettings

CONNECTOR_CLASS = "HiddenStatesConnector"
CONNECTOR_MODULE = "eagle3_pipeline.extraction.connector"


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


def speculation_flags(draft: Path, tokens: int) -> tuple[str, ...]:
    """Speculate with the EAGLE-3 draft in a folder, `tokens` at a time."""
    speculative = {"method": "eagle3", "model": str(draft.absolute()), "num_speculative_tokens": tokens}
    return ("--speculative_config", json.dumps(speculative))
