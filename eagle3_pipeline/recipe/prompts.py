"""Settings of the prompts: where they come from, how many, in which order."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from eagle3_pipeline.recipe.strict import HubId, Share, Strict


class PromptSource(Strict):
    """One source of prompts: a local file or a Hugging Face dataset."""

    path: Path | None = Field(default=None, strict=False)
    """A local .jsonl, .json, .parquet or .csv file, relative to the recipe's folder."""
    dataset: HubId | None = None
    """A Hugging Face dataset id such as `mlabonne/open-perfectblend`; it is streamed."""
    revision: str = "main"
    """Branch, tag or commit of `dataset`."""
    subset: str | None = None
    """Configuration of `dataset`, where it has several (`main` of `openai/gsm8k`)."""
    split: str = "train"
    """Split of `dataset`."""
    column: str | None = None
    """The column with the prompt, the user turns or the conversation; recognised when left out."""
    weight: PositiveFloat = 1
    """Prompts kept of this source, relative to the other sources, for as long as it has rows."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("exactly one of path and dataset is wanted")
        return self


class Prompts(Strict):
    """Which prompts the target answers, in which order, and how many in one shard."""

    sources: tuple[PromptSource, ...] = Field(strict=False, min_length=1)
    """Where prompts come from; several sources are mixed by weight."""
    count: PositiveInt
    """Prompts to use: the first `count` of the fixed order. Raising it redoes nothing."""
    per_shard: PositiveInt
    """Prompts in one shard (= one Dagster partition). Another size is another plan: nothing is shared."""
    validation: PositiveInt = 64
    """The first so many prompts judge the draft and never train it; at most half of the first shard, and one
    at least. The target answers them greedily, and no training prompt is near one of them."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the order of prompts."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts, in tokens of the target, are rejected (and counted)."""
    near_duplicate_similarity: Share = 0.7
    """Prompts whose sets of 5-word shingles have a higher Jaccard similarity than this are dropped. Those
    near evaluation prompts are dropped above 0.7 at the latest, whatever this is."""

    @model_validator(mode="after")
    def _whole_shards(self) -> Self:
        if self.count % self.per_shard:
            lower = self.count - self.count % self.per_shard
            raise ValueError(
                f"count {self.count} is not a multiple of per_shard {self.per_shard}, so the last shard "
                f"would change when the count is raised: use {lower or self.per_shard} or "
                f"{lower + self.per_shard}"
            )
        return self

    @property
    def validation_prompts(self) -> int:
        """How many prompts of the first shard judge the draft; those of all other shards train it."""
        return max(1, min(self.validation, self.per_shard // 2))

    @property
    def shards(self) -> tuple[str, ...]:
        """Names of all shards. A name carries the size: `p500-s007` is never a shard of another plan."""
        return tuple(f"p{self.per_shard}-s{number:03d}" for number in range(self.count // self.per_shard))
