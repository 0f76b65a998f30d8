"""Alternatives compared: each is trained as a recipe of its own, and the best draft goes on.

    draft_checkpoint/<fingerprint>/     of each alternative (alternatives.py): a training like any other
    draft_checkpoint/<fingerprint>/     of the sweep
        draft/          of the best: hard links, or copies where there are none
        metrics.jsonl   its steps and epochs
        manifest.json   its facts, with `alternative`, its name, and `sweep`, the table of all

The best has the longest simulated acceptance; of equal ones, it is the first of the recipe. A loss that is no
number, or a step that does not fit into memory, ends one alternative, not the comparison. After a kill the
next call trains what is not finished.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagle3_pipeline.alternatives import alternatives
from eagle3_pipeline.durable_files import fsync_folder, link_or_copy, sha256_of_file
from eagle3_pipeline.errors import DamagedFile, NotEnoughMemory, QualityError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.training.events import MARK, Listener, describe
from eagle3_pipeline.vocabulary.mapping import make_vocabulary

logger = logging.getLogger(__name__)

Train = Callable[[Lineage, Listener], Manifest]


@dataclass(frozen=True)
class Trained:
    """One alternative after its training."""

    name: str
    settings: dict[str, Any]
    """In what it differs from the recipe."""
    place: Place
    made: Manifest | None
    """None where it failed."""
    failed: str | None = None
    """Why it failed."""

    @property
    def acceptance_length(self) -> float:
        """By which alternatives are compared; a draft that there is not accepts nothing."""
        return float(self.made.facts["simulated_acceptance_length"]) if self.made else 0.0

    def row(self) -> dict[str, Any]:
        """Its line of the table. What was measured is None where it failed."""
        facts = self.made.facts if self.made else {}
        return {
            "alternative": self.name,
            "settings": self.settings,
            "acceptance_length": self.acceptance_length if self.made else None,
            **{name: facts.get(name) for name in ("loss", "steps", "seconds", "validation_curve")},
            "failed": self.failed,
            "folder": self.place.folder.name,
        }


def train_alternatives(lineage: Lineage, train: Train, on_event: Listener) -> list[Trained]:
    """Train each alternative that is not trained yet; all of them, in the recipe's order.

    `on_event` hears the events of each, with its name, and its end. Raises what `train` raises but
    QualityError and NotEnoughMemory, and the first of them where no alternative is left.
    """
    recipes = alternatives(lineage)
    for one in recipes.values():
        make_vocabulary(one)  # of another size; the recipe's own is there
    done: list[Trained] = []
    for number, (name, one) in enumerate(recipes.items(), 1):
        settings = lineage.recipe.training.sweep[name]
        logger.info("alternative %s (%d of %d) trains with %s", name, number, len(recipes), settings)
        done.append(_train_one(name, settings, one, train, on_event))
        event = {MARK: "alternative", "number": number, "of": len(recipes), **done[-1].row()}
        logger.info("%s", describe(event))
        on_event(event)
    if not any(one.made for one in done):
        reasons = "\n".join(f"  {one.name}: {one.failed}" for one in done)
        raise QualityError(f"all {len(done)} alternatives of training.sweep failed:\n{reasons}")
    return done


def _train_one(
    name: str, settings: dict[str, Any], one: Lineage, train: Train, on_event: Listener
) -> Trained:
    place = one.draft_checkpoint()
    try:
        made = train(one, lambda event: on_event({**event, "alternative": name}))
    except (QualityError, NotEnoughMemory) as error:
        return Trained(name, settings, place, None, str(error))
    return Trained(name, settings, place, made)


def take_best(place: Place, trained: list[Trained]) -> Manifest:
    """Make the draft of the sweep from that of the best alternative; raises DamagedFile."""
    best = max(trained, key=lambda one: one.acceptance_length)  # the first one of equals
    logger.info("%s is the best alternative: acceptance length %.3f", best.name, best.acceptance_length)
    made = best.place.verify()
    shutil.rmtree(place.folder / "draft", ignore_errors=True)  # what a kill left
    checksums = {}
    for entry in made.files:
        source, target = best.place.folder / entry.path, place.folder / entry.path
        link_or_copy(source, target)
        if (found := sha256_of_file(target)) != entry.sha256:
            raise DamagedFile(
                f"{target} has the checksum {found[:12]}, {source} has {entry.sha256[:12]}. Is the disk "
                "sound? Materialise draft_checkpoint again."
            )
        checksums[target] = found
    fsync_folder(place.folder / "draft")
    facts = {**made.facts, "alternative": best.name, "sweep": [one.row() for one in trained]}
    return place.finish(checksums, facts, checksums)
