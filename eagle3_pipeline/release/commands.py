"""The commands that serve a target with its draft, ready for a POSIX shell.

They carry what the target needs to be loaded as it was measured (revision, own code, quantization, parallel
sizes), and leave to the reader what depends on the machine (memory, context, number of requests).
"""

import json
import shlex

from eagle3_pipeline.recipe.extras import FLAG_OF_SETTING
from eagle3_pipeline.recipe.server import ServerSettings
from eagle3_pipeline.recipe.settings import Recipe
from eagle3_pipeline.release.names import target_name

_OF_TARGET = (
    *("quantization", "dtype"),
    *("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel"),
)


def serve_line(recipe: Recipe, draft: str, *, target: str | None = None) -> str:
    """vLLM's, with the draft in folder `draft`; `target` is the target's folder, if not its public name."""
    speculation = {
        "method": "eagle3",
        "model": draft,
        "num_speculative_tokens": recipe.evaluation.speculative_tokens,
    }
    command = ["vllm", "serve", target or target_name(recipe.target)]
    command += [*_of_target(recipe, with_revision=target is None), *_settings(recipe.server.evaluation)]
    return shlex.join([*command, "--speculative-config", json.dumps(speculation)])


def sglang_line(recipe: Recipe, draft: str) -> str:
    """SGLang's, with the draft in folder `draft`, which is in the EAGLE-3 layout.

    A chain of as many tokens as vLLM is told: one branch (`eagle-topk 1`), so many steps, and one more token
    to check, the target's own.
    """
    tokens, settings = recipe.evaluation.speculative_tokens, recipe.server.evaluation
    command = ["python", "-m", "sglang.launch_server", "--model-path", target_name(recipe.target)]
    command += _of_target(recipe, with_revision=True)
    command += ["--tp-size", str(settings.tensor_parallel)] if settings.tensor_parallel > 1 else []
    command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft]
    command += ["--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"]
    return shlex.join([*command, "--speculative-num-draft-tokens", str(tokens + 1)])


def _of_target(recipe: Recipe, *, with_revision: bool) -> list[str]:
    """Flags that both have: of the revision on the hub, and for code that the model brings along."""
    target, flags = recipe.target, []
    if with_revision and target.hub_id is not None and target.revision != "main":
        flags += ["--revision", target.revision]
    return [*flags, "--trust-remote-code"] if target.trust_remote_code else flags


def _settings(settings: ServerSettings) -> list[str]:
    """vLLM's flags of what is set otherwise than by default."""
    flags: list[str] = []
    for name in _OF_TARGET:
        value = getattr(settings, name)
        if value is True:
            flags.append(FLAG_OF_SETTING[name])
        elif value != ServerSettings.model_fields[name].default:
            flags += [FLAG_OF_SETTING[name], str(value)]
    return flags
