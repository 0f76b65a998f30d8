"""The settings of a recipe. Units stand in the names (`_s` seconds, `_gib` GiB, `_tokens`) or in the text.

Each setting's docstring is its documentation: the user guide and the error messages take it from here.
"""

import re
from typing import Annotated, Any, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from eagle3_pipeline.recipe.evaluation import Evaluation
from eagle3_pipeline.recipe.extraction import Extraction
from eagle3_pipeline.recipe.generation import Generation
from eagle3_pipeline.recipe.models import BaseDraft, Target
from eagle3_pipeline.recipe.partitions import Partitions
from eagle3_pipeline.recipe.prompts import Prompts
from eagle3_pipeline.recipe.release import Release
from eagle3_pipeline.recipe.server import PHASES, Servers
from eagle3_pipeline.recipe.strict import Strict
from eagle3_pipeline.recipe.training import Training

# As Dagster wants it.
_OWNER = r"team:.+|[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7}"
# Settings of `training` that a base draft answers itself.
_OF_NEW_DRAFTS = {
    *("per_layer_norm", "norm_output", "norm_before_residual"),
    *("attention_window", "intermediate_size"),
}


class Vocabulary(Strict):
    """The draft's vocabulary: the tokens of the target that it may propose."""

    draft_tokens: PositiveInt = 32000
    """Size of the draft's vocabulary: the most frequent tokens of the completions, and special ones."""


class Run(Strict):
    """How much of the plan one run does."""

    shards: PositiveInt | None = None
    """Take only the first so many shards through all phases: the pilot. Its samples are kept."""


class StorageBudget(Strict):
    """How much of the disk this recipe may fill."""

    max_gib: PositiveFloat | None = None
    """Upper bound for everything below the recipe's folder; the disk itself is the limit when left out."""
    keep_free_gib: Annotated[float, Field(ge=0)] = 1.0
    """Hidden states leave this much of the disk free for everything else."""


class Recipe(Strict):
    """Every choice of one job. See docs/settings.md for each setting."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    """Name of the recipe: lower-case letters, digits, dots and dashes."""
    owner: str | None = None
    """Whom Dagster names as the owner of the assets: an e-mail address, or `team:` and a name."""
    target: Target
    base_draft: BaseDraft | None = None
    partitions: Partitions = Partitions()
    server: Servers = Servers()
    prompts: Prompts
    generation: Generation = Generation()
    extraction: Extraction
    vocabulary: Vocabulary = Vocabulary()
    training: Training = Training()
    evaluation: Evaluation
    release: Release = Release()
    run: Run = Run()
    storage: StorageBudget = StorageBudget()

    @property
    def slug(self) -> str:
        """The name as Dagster allows it in keys, groups and jobs; also the folder below the storage root."""
        return re.sub(r"[^a-z0-9]", "_", self.name)

    @property
    def shards(self) -> tuple[str, ...]:
        """Names of the shards that a run takes: all of them, or the first `run.shards`."""
        return self.prompts.shards[: self.run.shards]

    @field_validator("owner")
    @classmethod
    def _is_an_owner(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(_OWNER, value):
            raise ValueError(
                f"owner is {value!r}, expected an e-mail address such as ann@example.org, or a team such as "
                "team:models"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.run.shards is not None and self.run.shards > len(self.prompts.shards):
            raise ValueError(
                f"run.shards is {self.run.shards}, the plan has {len(self.prompts.shards)} shards"
            )
        room = {
            "prompts.max_prompt_tokens + generation.max_completion_tokens": (
                self.prompts.max_prompt_tokens + self.generation.max_completion_tokens,
                "generation",
            ),
            "extraction.max_sample_tokens": (self.extraction.max_sample_tokens, "extraction"),
            "prompts.max_prompt_tokens + evaluation.max_completion_tokens": (
                self.prompts.max_prompt_tokens + self.evaluation.max_completion_tokens,
                "evaluation",
            ),
        }
        for what, (tokens, phase) in room.items():
            limit = getattr(self.server, phase).max_model_len
            if limit is not None and tokens > limit:
                raise ValueError(f"{what} is {tokens}, more than server.{phase}.max_model_len {limit}")
        names = [one.name for one in self.evaluation.sets]
        if len(set(names)) != len(names):
            raise ValueError(f"evaluation.sets has a name twice: {names}")
        has_base = self.base_draft is not None
        self.release.check_gate(names, self.evaluation.speculative_tokens, has_base=has_base)
        for phase in PHASES:
            getattr(self.server, phase).check_partition(phase, getattr(self.partitions, phase))
        return self

    @model_validator(mode="after")
    def _captures_rightly_while_generating(self) -> Self:
        extraction, generation = self.extraction, self.server.generation
        if not extraction.while_generating:
            return self
        way_out = "or set extraction.while_generating to false"
        if self.generation.temperature != 0:
            raise ValueError(
                f"extraction.while_generating with generation.temperature {self.generation.temperature:g}: "
                "when sampling, a server that captures hidden states answers garbage, with HTTP 200. Set the "
                f"temperature to 0, {way_out}"
            )
        if (extraction.waves, extraction.passes) != (1, 1):
            raise ValueError(
                "extraction.while_generating leaves the states of all samples on the disk at once, but "
                f"extraction.waves is {extraction.waves} and extraction.passes {extraction.passes}: set both "
                f"to 1, {way_out}"
            )
        for name in ("dtype", "quantization"):
            if getattr(generation, name) != getattr(self.server.extraction, name):
                raise ValueError(
                    f"extraction.while_generating with another {name} in server.generation than in "
                    "server.extraction, which makes the states that generation could not: set both to the "
                    f"same, {way_out}"
                )
        self.server.check_capture("generation")
        return self

    @model_validator(mode="after")
    def _epochs_in_passes(self) -> Self:
        if self.training.epochs % self.extraction.passes:
            raise ValueError(
                f"training.epochs is {self.training.epochs}, extraction.passes is {self.extraction.passes}: "
                "each pass trains the same number of epochs, so make epochs a multiple of "
                f"{self.extraction.passes}"
            )
        return self

    @model_validator(mode="after")
    def _alternatives_can_be_compared(self) -> Self:
        training, most = self.training, self.vocabulary.draft_tokens
        if self.extraction.waves != "auto":  # else the audit decides
            training.require_one_wave(self.extraction.waves)
        for name in training.sweep:
            if (tokens := training.draft_tokens_of(name)) is None:
                continue
            if self.base_draft is not None:
                raise ValueError(
                    f"training.sweep.{name} sets draft_tokens, but base_draft keeps its own vocabulary: "
                    "remove it"
                )
            if tokens > most:
                raise ValueError(
                    f"training.sweep.{name}.draft_tokens is {tokens}, more than vocabulary.draft_tokens "
                    f"{most}: raise that one"
                )
        return self

    @model_validator(mode="after")
    def _base_draft_keeps_its_shape(self) -> Self:
        if self.base_draft is None:
            return self
        given = {"training": self.training.model_fields_set}
        given |= {f"training.sweep.{name}": set(one) for name, one in self.training.sweep.items()}
        for where, names in given.items():
            if found := sorted(names & _OF_NEW_DRAFTS):
                raise ValueError(
                    f"{where} sets {', '.join(found)} for a new draft, but base_draft keeps its own shape "
                    "and norms: remove it"
                )
        return self

    def alternative(self, name: str) -> "Recipe":
        """The recipe that trains nothing but this alternative of the sweep."""
        tokens = self.training.draft_tokens_of(name) or self.vocabulary.draft_tokens
        changes = {
            "training": self.training.alternative(name),
            "vocabulary": self.vocabulary.model_copy(update={"draft_tokens": tokens}),
        }
        return self.model_copy(update=changes)

    def settings(self, *sections: str) -> dict[str, Any]:
        """The named sections as JSON values, for fingerprints and provenance."""
        return self.model_dump(mode="json", include=set(sections))
