"""Whether vLLM gives hidden states of the target: it knows by the class of the model, so it is asked."""

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3_pipeline.child_environment import without_secrets
from eagle3_pipeline.doctor.finding import Finding, note, ok, problem
from eagle3_pipeline.doctor.server_python import python_of
from eagle3_pipeline.lineage import Lineage

logger = logging.getLogger(__name__)

# What the engine asks of a loaded model before it captures anything (`_setup_eagle3_aux_hidden_state_outputs`
# in vllm/v1/worker/gpu_model_runner.py, gpu/spec_decode/eagle/eagle3_utils.py beside it), asked of its class,
# which needs no weights. The answer is the last line, after whatever importing prints.
_ASK = """
import json, sys
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.registry import ModelRegistry
known = [name for name in json.loads(sys.argv[1]) if name in ModelRegistry.models]
able = [name for name in known if supports_eagle3(ModelRegistry.models[name].load_model_cls())]
print()
print(json.dumps({"known": known, "able": able}))
"""
_LIMIT_S = 180


def architecture(lineage: Lineage) -> Iterator[Finding]:
    """One line on the target's architecture and the vLLM of the extraction server."""
    config = _config(lineage)
    if config is None:
        yield note(
            "the target's architecture is unknown yet: it is neither made nor on this disk",
            "Ask again when target_model is made.",
        )
        return
    if not config.is_file():
        yield problem(f"the target has no {config}", "Correct target in the recipe, or make it again.")
        return
    names = json.loads(config.read_text()).get("architectures") or []
    if not names:
        yield problem(f"{config} names no architectures", "Take a model folder that vLLM can serve.")
        return
    yield _judge(", ".join(names), _ask(lineage, names))


def _config(lineage: Lineage) -> Path | None:
    """The target's config.json, without downloading or converting anything."""
    target = lineage.recipe.target
    if lineage.target_model().manifest() is not None:
        return lineage.model_path() / "config.json"
    if target.path is not None:
        return target.path / "config.json"
    if target.hub_id is not None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(target.hub_id, "config.json", revision=target.revision)
        return Path(cached) if isinstance(cached, str) else None
    return None


def _ask(lineage: Lineage, names: list[str]) -> dict[str, Any] | Finding:
    """Which of the architectures vLLM knows, and of which it gives hidden states."""
    settings = lineage.recipe.server.extraction
    python = python_of(settings)
    logger.info("asking vLLM of %s about %s", python, ", ".join(names))
    try:
        asked = subprocess.run(
            [python, "-c", _ASK, json.dumps(names)],
            env={**without_secrets(os.environ), **settings.extra_env, "VLLM_LOGGING_LEVEL": "ERROR"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
        if asked.returncode == 0:
            answer: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
            return answer
        why = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"no answer within {_LIMIT_S} s"
    except (OSError, ValueError, IndexError) as error:
        why = str(error)
    return problem(
        f"vLLM of {python} cannot say whether it gives hidden states of {', '.join(names)}: {why}",
        "Install vLLM there, or set server.extraction.python to a Python that has it.",
    )


def _judge(names: str, answer: dict[str, Any] | Finding) -> Finding:
    if isinstance(answer, Finding):
        return answer
    if answer["able"]:
        return ok(f"architecture {names}: vLLM gives hidden states of it")
    if answer["known"]:
        return problem(
            f"architecture {names}: vLLM serves it, but gives no hidden states of it (no SupportsEagle3)",
            "Take another target, or a vLLM whose model class has SupportsEagle3.",
        )
    return note(
        f"architecture {names}: vLLM has no class of its own for it; it may serve it through Transformers",
        "Try a pilot (run.shards: 1) before anything long: extraction would refuse it when it starts.",
    )
