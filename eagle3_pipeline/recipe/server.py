"""Settings of the vLLM servers: one common block, and what each phase changes of it."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.recipe.extras import check_arguments, check_environment, check_extraction_arguments
from eagle3_pipeline.recipe.strict import Strict

PHASES = ("generation", "extraction", "evaluation")
"""Phases that have a server."""

_RESULT_SETTINGS = ("max_model_len", "quantization", "dtype", "reasoning_parser", "extra_args")
_SPEED_SETTINGS = (
    *("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel"),
    *("gpu_memory_utilization", "cpu_kv_cache_gib", "max_num_seqs", "enforce_eager"),
)


class ServerSettings(Strict):
    """One vLLM server. `--speculative-config`, `--kv-transfer-config` and the port are set by the phase."""

    python: Path | None = Field(default=None, strict=False)
    """The Python that runs vLLM, a path that may be relative to the recipe's folder; by default the one that
    runs this pipeline."""
    max_model_len: PositiveInt | None = None
    """Longest prompt + completion in tokens; by default the model's own limit."""
    tensor_parallel: PositiveInt = 1
    """GPUs (or CPU ranks) over which each layer is split."""
    pipeline_parallel: PositiveInt = 1
    """Stages into which the layers are split."""
    data_parallel: PositiveInt = 1
    """Replicas of the attention layers; with `expert_parallel` the experts spread over all ranks."""
    expert_parallel: bool = False
    """Spread whole experts over the ranks instead of splitting each."""
    quantization: str | None = None
    """vLLM's quantization name, where the model's config does not say it."""
    dtype: str = "bfloat16"
    """Type of weights and activations."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the memory of each GPU (or of the machine, on the CPU) that vLLM may take."""
    cpu_kv_cache_gib: PositiveFloat | None = None
    """Size of the KV cache on the CPU."""
    max_num_seqs: PositiveInt | None = None
    """Most sequences in one step; by default vLLM's."""
    enforce_eager: bool = False
    """Skip compilation: starts faster, serves slower."""
    reasoning_parser: str | None = None
    """vLLM's parser that splits thoughts from the answer."""
    extra_args: tuple[str, ...] = Field(default=(), strict=False)
    """Further arguments, as vLLM spells them, one list item per word. What a setting, the phase or the
    pipeline stands for is refused in any spelling; so is, in extraction, what makes states missing."""
    extra_env: dict[str, str] = Field(default={})
    """Further environment variables. They win over what the pipeline sets; keys, GPUs and a time limit of
    vLLM below `start_timeout_s` are refused."""
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port on the loopback address; by default a free one is chosen."""
    start_timeout_s: PositiveFloat = 1800
    """Limit from start to ready; vLLM's own limit is set to the same."""
    stall_timeout_s: PositiveFloat = 300
    """A server in use that makes no token for its requests for this long is ended, and the step tried
    again."""
    idle_timeout_s: NonNegativeInt = 600
    """A server that nobody uses is stopped after this time."""

    @field_validator("extra_args")
    @classmethod
    def _no_flag_of_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        check_arguments(value)
        return value

    @model_validator(mode="after")
    def _environment_leaves_ours_alone(self) -> Self:
        check_environment(self.extra_env, self.start_timeout_s)
        return self

    def result_settings(self, *, with_speed: bool = False) -> dict[str, Any]:
        """What changes replies and states, as JSON values for a fingerprint; or their speed as well.

        Parallel sizes, compilation and cache sizes change the last bits of a rounding, as other load on
        the server does: they count as speed. Of `extra_env` there is only a hash: values may be secrets.
        """
        names = set(_RESULT_SETTINGS) | set(_SPEED_SETTINGS if with_speed else ())
        hidden = fingerprint(self.extra_env) if self.extra_env else None
        return {**self.model_dump(mode="json", include=names), "extra_env": hidden}

    def check_partition(self, phase: str, gpus: tuple[str, ...]) -> None:
        """Raise ValueError unless the parallel sizes are those of the partition's GPUs."""
        wanted = self.tensor_parallel * self.pipeline_parallel * self.data_parallel
        if gpus and wanted != len(gpus):
            raise ValueError(
                f"server.{phase}: tensor_parallel x pipeline_parallel x data_parallel = {wanted}, but "
                f"partitions.{phase} has {len(gpus)} GPUs: make both {len(gpus)}, or take fewer GPUs"
            )
        if self.expert_parallel and self.tensor_parallel * self.data_parallel == 1:
            raise ValueError(
                f"server.{phase}: expert_parallel wants tensor_parallel or data_parallel above 1: stages of "
                "pipeline_parallel share no experts"
            )


class Servers(Strict):
    """The servers of the phases. `common` holds for all; a phase's own block changes single settings."""

    generation: ServerSettings = ServerSettings()
    extraction: ServerSettings = ServerSettings()
    evaluation: ServerSettings = ServerSettings()

    @model_validator(mode="before")
    @classmethod
    def _spread_common(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        phases = {name: block for name, block in value.items() if name != "common"}
        common = value.get("common") or {}
        if not isinstance(common, dict):
            raise ValueError("common must be a block of settings")
        for phase in PHASES:
            own = phases.get(phase) or {}
            phases[phase] = {**common, **own} if isinstance(own, dict) else own
        return phases

    def phase(self, name: str) -> ServerSettings:
        """The settings of `generation`, `extraction` or `evaluation`."""
        settings: ServerSettings = getattr(self, name)
        return settings

    @model_validator(mode="after")
    def _extraction_captures_every_state(self) -> Self:
        self.check_capture("extraction")
        return self

    def check_capture(self, phase: str) -> None:
        """Raise ValueError where the server of a phase would miss hidden states."""
        settings = self.phase(phase)
        try:
            check_extraction_arguments(settings.extra_args)
        except ValueError as error:
            raise ValueError(f"server.{phase}.extra_args: {error}") from error
        if settings.pipeline_parallel > 1:
            # vllm/config/speculative.py verifies the model that keeps the states, which knows no stages.
            raise ValueError(
                f"server.{phase}.pipeline_parallel is {settings.pipeline_parallel}, but vLLM "
                "captures hidden states with one stage only: set it to 1 there, and raise tensor_parallel"
            )
