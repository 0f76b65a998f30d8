"""Settings of the release: what must hold before it, its name, and where it is published."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from eagle3_pipeline.recipe.strict import Strict


class Bound(Strict):
    """One number of the report that must not be too small."""

    number: Literal["acceptance_length", "position_0", "speedup", "to_base"]
    """`acceptance_length`; `position_0`, the share of drafts whose first token is accepted; `speedup`, tokens
    per second with and without the draft; `to_base`, the acceptance length over that of the base draft."""
    at_least: FiniteFloat
    """The smallest value that is released."""
    set: str | None = None
    """Name of an evaluation set; all sets together when left out."""

    @property
    def name(self) -> str:
        """The number and what it is of, for people."""
        return f"{self.number} of {self.set or 'all sets'}"


class Publish(Strict):
    """A repository on the Hugging Face Hub. The token comes from the environment (`HF_TOKEN`)."""

    hub_id: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    """Such as `my-name/my-model-eagle3`."""
    private: bool = True
    """Whether the repository is made private where there is none yet."""


class Release(Strict):
    """What must hold before a draft is released, under which name, and where it is published."""

    gate: tuple[Bound, ...] = Field(default=(), strict=False)
    """All of these must hold. By default an `acceptance_length` of at least 1, and with a base draft a
    `to_base` of at least 1."""
    name: str | None = None
    """Name of the released draft; by default the recipe's name with `-eagle3`."""
    license: Annotated[str, Field(pattern=r"^[\w.+-]+$")] = "other"
    """Licence identifier for the model card; the target's licence binds a draft trained on its outputs."""
    folder: Path | None = Field(default=None, strict=False)
    """A folder that gets a copy of each version; none when left out."""
    publish: Publish | None = None
    """Where each version is published; nowhere when left out."""

    def bounds(self, *, has_base: bool) -> tuple[Bound, ...]:
        """What must hold: the gate, or the default one."""
        if self.gate:
            return self.gate
        least = Bound(number="acceptance_length", at_least=1.0)
        return (least, Bound(number="to_base", at_least=1.0)) if has_base else (least,)

    def check_gate(self, sets: Collection[str], speculative_tokens: int, *, has_base: bool) -> None:
        """Raise ValueError for a bound on what the report will not have, or that no draft can reach."""
        most = {"acceptance_length": 1.0 + speculative_tokens, "position_0": 1.0}
        for bound in self.gate:
            what = f"release.gate: {bound.name}"
            if bound.set is not None and bound.set not in sets:
                raise ValueError(f"{what}: no such set, evaluation.sets has {', '.join(sets)}")
            if bound.number == "to_base" and not has_base:
                raise ValueError(f"{what}: the recipe has no base_draft. Name one, or remove this bound")
            if bound.at_least > most.get(bound.number, bound.at_least):
                raise ValueError(
                    f"{what} is at most {most[bound.number]:g}, at_least {bound.at_least:g} is never reached"
                )
