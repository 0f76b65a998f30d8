"""Settings of the release: what must hold before it, its name, and where it is published."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from eagle3_pipeline.recipe.strict import Strict


class Bound(Strict):
    """One number of the report that must not be too small."""

    number: Literal["acceptance_length", "position_0", "speedup", "to_base"]
    """`acceptance_length`; `position_0`, the share of drafts whose first token is accepted; `speedup`, tokens
    per second with and without the draft; `to_base`, the acceptance length over that of the base draft."""
    at_least: float
    """The smallest value that is released."""
    set: str | None = None
    """Name of an evaluation set; all sets together when left out."""


class Publish(Strict):
    """A repository on the Hugging Face Hub. The token comes from the environment (`HF_TOKEN`)."""

    hub_id: str
    """Such as `my-name/my-model-eagle3`."""
    private: bool = True
    """Whether the repository is made private where there is none yet."""


class Release(Strict):
    """What must hold before a draft is released, under which name, and where it is published."""

    gate: tuple[Bound, ...] = Field(default=(Bound(number="acceptance_length", at_least=1.0),), strict=False)
    """All of these must hold."""
    name: str | None = None
    """Name of the released draft; by default the recipe's name with `-eagle3`."""
    license: str = "other"
    """Licence identifier for the model card; the target's licence binds a draft trained on its outputs."""
    folder: Path | None = Field(default=None, strict=False)
    """A folder that gets a copy of each version; none when left out."""
    publish: Publish | None = None
    """Where each version is published; nowhere when left out."""
