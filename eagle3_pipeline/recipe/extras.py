"""What a recipe may hand to vLLM beside its settings, `extra_args` and `extra_env`, and what it may not.

An argument that a setting or a phase stands for is refused in each spelling that vLLM's parser takes
(vllm/utils/argparse_utils.py, on Python's argparse). It would win over the setting unseen, and GPUs, lengths
and addresses would no longer be those of the recipe:

    --tensor-parallel-size 2   --tensor_parallel_size=2   --tensor-par 2   -tp 2   -t 2
    --speculative-config.model X   -sc.model X   --no-enable-expert-parallel
"""

import re
from collections.abc import Collection, Mapping, Sequence

from eagle3_pipeline.child_environment import is_secret

TIME_LIMIT_VARIABLE = "VLLM_ENGINE_READY_TIMEOUT_S"
"""vLLM's own limit on the start of its engine, inside `start_timeout_s`."""

FLAG_OF_SETTING = {
    "max_model_len": "--max-model-len",
    "tensor_parallel": "--tensor-parallel-size",
    "pipeline_parallel": "--pipeline-parallel-size",
    "data_parallel": "--data-parallel-size",
    "quantization": "--quantization",
    "dtype": "--dtype",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "max_num_seqs": "--max-num-seqs",
    "reasoning_parser": "--reasoning-parser",
    "expert_parallel": "--enable-expert-parallel",
    "enforce_eager": "--enforce-eager",
}
"""Settings of a server that are one flag of vLLM."""

_PHASE = "the phase sets it, from extraction.layers or evaluation.speculative_tokens"
_ADDRESS = "servers are asked by HTTP, at their port on the loopback address"
# Flag -> what to do instead, or why not.
_OURS = {
    **{flag: f"use the setting {name}" for name, flag in FLAG_OF_SETTING.items()},
    "--device-memory-utilization": "use the setting gpu_memory_utilization",
    "--no-enable-expert-parallel": "use the setting expert_parallel",
    "--no-enforce-eager": "use the setting enforce_eager",
    "--hf-token": "a token shows in ps and in the recipe; a server takes a folder and needs none",
    "--trust-remote-code": "use target.trust_remote_code",
    "--no-trust-remote-code": "use target.trust_remote_code",
    "--model": "the model is the recipe's target",
    "--served-model-name": "a server of ours is known by its name, which carries the fingerprint",
    "--port": "use the setting port",
    "--host": _ADDRESS,
    "--uds": _ADDRESS,
    "--grpc": _ADDRESS,
    "--headless": _ADDRESS,
    "--ssl-keyfile": _ADDRESS,
    "--ssl-certfile": _ADDRESS,
    "--api-key": "a key shows in ps and locks out our own requests; no server listens to other machines",
    "--speculative-config": _PHASE,
    "--spec-method": _PHASE,
    "--spec-model": _PHASE,
    "--spec-tokens": _PHASE,
    "--kv-transfer-config": "the phase extraction sets it",
    "--device-ids": "use partitions",
    "--prefill-context-parallel-size": "it takes more GPUs than the partition has",
    "--disable-log-stats": "acceptance and life are read from the server's counters",
    "--config": "a file may hold any flag; write its flags here",
}
_NOT_IN_EXTRACTION = {
    "--enable-prefix-caching": "tokens in the cache are not computed again, so their states would be missing",
    "--enable-chunked-prefill": "states of later chunks went missing with it; vLLM chunks where that is safe",
    "--kv-offloading-size": "it puts another connector in the place of the one that writes states",
    "--decode-context-parallel-size": "each rank holds a part of the states, and only one writes",
    "--enable-dbo": "vLLM captures no states with it",
}
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-cc": "--compilation-config",
}
# Flags of other meaning that begin a short one; an exact name is no abbreviation.
_NO_ABBREVIATIONS = {"-dc"}
_NOT_IN_ENVIRONMENT = {
    "VLLM_API_KEY": "a key locks out our own requests; no server listens to other machines",
    "VLLM_RPC_BASE_PATH": "each server has a folder of its own for its sockets",
    "CUDA_VISIBLE_DEVICES": "use partitions",
}


def flag_in(argument: str, flags: Collection[str]) -> str | None:
    """Which of `flags` (long names) vLLM's parser may take `argument` for, None for any other or a value."""
    if len(argument) < 2 or not argument.startswith("-") or re.fullmatch(r"-[\d.]+", argument):
        return None
    name = _name_of(argument)
    if name.startswith("--"):
        name = name.replace("_", "-")
        return name if name in flags else next((flag for flag in flags if flag.startswith(name)), None)
    if name in _SHORT:
        return _SHORT[name] if _SHORT[name] in flags else None
    if name in _NO_ABBREVIATIONS:
        return None
    # The value of a flag of one letter may follow without a blank: -qawq.
    meant = (flag for short, flag in _SHORT.items() if short.startswith(name) or name[:2] == short)
    return next((flag for flag in meant if flag in flags), None)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ValueError where `extra_args` holds what the pipeline sets itself."""
    if "--" in arguments:
        raise ValueError("-- ends the flags, and flags of the pipeline come after these: remove it")
    _refuse(arguments, _OURS, "is not for extra_args")


def check_extraction_arguments(arguments: Sequence[str]) -> None:
    """Raise ValueError where the `extra_args` of extraction hold what makes states wrong or missing."""
    _refuse(arguments, _NOT_IN_EXTRACTION, "is forbidden in extraction")


def check_environment(environment: Mapping[str, str], start_timeout_s: float) -> None:
    """Raise ValueError where `extra_env` holds what the pipeline sets itself, or a time limit too short."""
    for name, instead in _NOT_IN_ENVIRONMENT.items():
        if name in environment:
            raise ValueError(f"extra_env has {name}: {instead}. Remove it")
    if secrets := sorted(filter(is_secret, environment)):
        raise ValueError(
            f"extra_env has {', '.join(secrets)}: a recipe is shown and passed on, so it holds no secret. "
            "Remove it: servers load folders, and what downloads takes HF_TOKEN from the environment"
        )
    limit = environment.get(TIME_LIMIT_VARIABLE)
    if limit is None:
        return
    if not limit.isdecimal() or int(limit) < start_timeout_s:
        raise ValueError(
            f"extra_env sets {TIME_LIMIT_VARIABLE} to {limit!r}, expected whole seconds, and no fewer than "
            f"start_timeout_s {start_timeout_s:g}: vLLM would give up first. Leave it out: it follows "
            "start_timeout_s"
        )


def _refuse(arguments: Sequence[str], flags: Mapping[str, str], why: str) -> None:
    for argument in arguments:
        if (flag := flag_in(argument, flags)) is not None:
            # Never the value: it may be a key.
            shown = flag if _name_of(argument) == flag else f"{_name_of(argument)} ({flag})"
            raise ValueError(f"{shown} {why}: {flags[flag]}")


def _name_of(argument: str) -> str:
    """`--a-b` of `--a-b=1`, `--a-b.c.d=1` and, in one item by mistake, of `--a-b 1`."""
    return re.split(r"[=.\s]", argument, maxsplit=1)[0]
