"""Settings of the extraction: which hidden states are kept, how exactly, and how they fit the disk."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from eagle3_pipeline.recipe.layers import from_output_of_layer, require_rising
from eagle3_pipeline.recipe.strict import Strict

Precision = Literal["bf16", "fp8"]
Kept = Literal["all", "trained"]


class Extraction(Strict):
    """Which hidden states of the target are kept, and how."""

    layers: tuple[int, ...] = Field(strict=False, min_length=2)
    """Layer ids: id k is what enters layer k (Hugging Face `hidden_states[k]`). The last one is the
    number of layers: the last layer's output before the final norm. The others feed the draft."""
    layers_counted: Literal["input", "output"] = "input"
    """`output` where `layers` are of SGLang or SpecForge, which name the layer whose output it is: each is
    then one less than here."""
    concurrency: PositiveInt = 32
    """Requests at the server at the same time."""
    max_sample_tokens: PositiveInt = 4096
    """Longer samples (prompt + completion) are cut to this many tokens."""
    part_gib: PositiveFloat = 2.0
    """Largest size of one safetensors file of a shard."""
    precision: Precision = "bf16"
    """`fp8` keeps states in half the bytes: 8 bits each, with one scale per token and layer."""
    kept: Kept = "all"
    """`trained` leaves out the last layer's states of prompts, which only completions are trained with."""
    staging_gib: PositiveFloat = 4.0
    """Most bytes of states on their way from the server to the shards, on disk and in memory together."""
    max_quarantined_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """More samples of a shard or of a run than this with unusable states, and more than one, fail the
    step."""
    waves: PositiveInt | Literal["auto"] = 1
    """Parts in which the set is extracted, trained on and deleted, where it does not fit the disk at once;
    `auto` takes as few as fit."""
    passes: PositiveInt = 1
    """How often all waves are gone through; `training.epochs` is divided among the passes. More than one
    extracts every wave again."""
    while_generating: bool = False
    """Capture the states while the samples are generated, without a second server. Only for
    `generation.temperature: 0`."""
    unlisted_vllm: bool = False
    """Go on with a version of vLLM on which the capture of states was never tried."""

    @model_validator(mode="before")
    @classmethod
    def _count_by_input(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("layers_counted") != "output":
            return values
        ids = values.get("layers")
        if not isinstance(ids, list | tuple) or not all(isinstance(one, int) for one in ids):
            return values  # what is wrong with them is said below
        return {**values, "layers": from_output_of_layer(ids), "layers_counted": "input"}

    @model_validator(mode="after")
    def _rising(self) -> Self:
        require_rising(self.layers)
        return self
