"""The commits of a recipe's datasets: those that its prompts are of, and whether a branch has moved since."""

from dataclasses import dataclass

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import MANIFEST_NAME, read_manifest
from eagle3_pipeline.prompts.hub_dataset import pin, resolve_revision
from eagle3_pipeline.recipe.prompts import PromptSource


@dataclass(frozen=True)
class Moved:
    """A dataset of which the recipe's revision is another commit now."""

    dataset: str
    revision: str
    made_from: str
    now: str


def revisions(lineage: Lineage) -> dict[str, str]:
    """The commit of each dataset by its pin; earlier prompts keep theirs, since `main` may have moved.

    Raises BadInput, SourceUnreachable and DamagedFile.
    """
    known = _known(lineage)
    return {name: known.get(name) or resolve_revision(one) for name, one in _datasets(lineage).items()}


def moved(lineage: Lineage) -> list[Moved]:
    """The datasets that prompts were made of and that have moved on, each asked for; raises as above."""
    known = _known(lineage)
    asked = [
        Moved(str(one.dataset), one.revision, known[name], resolve_revision(one))
        for name, one in _datasets(lineage).items()
        if name in known
    ]
    return [one for one in asked if one.now != one.made_from]


def _datasets(lineage: Lineage) -> dict[str, PromptSource]:
    return {pin(one): one for one in lineage.recipe.prompts.sources if one.dataset is not None}


def _known(lineage: Lineage) -> dict[str, str]:
    known: dict[str, str] = {}
    for path in sorted(lineage.prompts().folder.parent.glob(f"*/{MANIFEST_NAME}")):
        known |= read_manifest(path).facts["revisions"]
    return known
