"""Settings of the report: with which prompts and how the draft is measured."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from eagle3_pipeline.recipe.strict import Strict


class EvaluationSet(Strict):
    """A named set of held-out prompts."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    """Name in the report."""
    path: Path = Field(strict=False)
    """A local file, relative to the recipe's folder."""
    column: str | None = None
    """The column with the prompt or the user turns (the first is used)."""
    count: PositiveInt | None = None
    """Use the first so many prompts; all when left out."""


class Grid(Strict):
    """Further settings of a measurement: each with each, and with those of the headline."""

    speculative_tokens: tuple[PositiveInt, ...] = Field(default=(), strict=False)
    """Tokens that the draft proposes per step. Each number is one more server to start."""
    temperature: tuple[Annotated[float, Field(ge=0, le=2)], ...] = Field(default=(), strict=False)
    """Sampling temperatures."""
    concurrency: tuple[PositiveInt, ...] = Field(default=(), strict=False)
    """Requests at the server at the same time."""


class Evaluation(Strict):
    """How the draft is measured: on the real server, by the server's own counters."""

    sets: tuple[EvaluationSet, ...] = Field(strict=False, min_length=1)
    """Held-out prompt sets. Training prompts that are near one of them are dropped."""
    speculative_tokens: PositiveInt = 3
    """Tokens that the draft proposes per step."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature; 0 is greedy."""
    max_completion_tokens: PositiveInt = 256
    """Longest reply in the measurement."""
    concurrency: PositiveInt = 1
    """Requests at the server at the same time. Speculation helps most when there are few."""
    repeats: PositiveInt = 3
    """How often each set is measured: the report gives the median speed and its spread."""
    grid: Grid = Grid()
    """Further settings that the draft is measured with, once each, for the report only."""
