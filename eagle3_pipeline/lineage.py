"""Which thing depends on what: the place and the fingerprint of every asset of a recipe.

A place is computed from the recipe and from the manifests of what it is made from, so that every
step, in whatever process, finds its inputs without being told, and a changed setting leads to new
places exactly where results change:

    target_model ─┬─ prompts ─ synthetic_samples ─┬─ sample_audit ─ hidden_state_shards ─┐
                  │                               └─ vocabulary_map ─────────────────────┤
                  └─ base_draft ─────────────────────────────────────── draft_checkpoint ┤
                                                   acceptance_report ─ released_draft ───┘

A shard of samples depends on its own prompts only: raising the count redoes nothing, and neither does
another evaluation set that drops none of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eagle3_pipeline.asset_settings import (
    of_audit,
    of_evaluation,
    of_prompts,
    of_release,
    of_samples,
    of_states,
    of_training,
    of_vocabulary,
)
from eagle3_pipeline.durable_files import sha256_of_file
from eagle3_pipeline.errors import BadInput, MissingInput
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.model_folder import content_of_model
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.recipe import Recipe


@dataclass(frozen=True)
class Lineage:
    """The places of one recipe below one storage root."""

    recipe: Recipe
    storage_root: Path

    @property
    def folder(self) -> Path:
        """Everything that this recipe makes lies below it."""
        return self.storage_root / self.recipe.slug

    @property
    def logs(self) -> Path:
        """Logs of the servers that work for this recipe."""
        return self.folder / "logs"

    @property
    def progress(self) -> Path:
        """How far steps are, for `eagle3 status`."""
        return self.folder / "progress"

    @property
    def staging(self) -> Path:
        """Where the extraction server leaves states until they are in a shard."""
        return self.folder / "staging" / "hidden_states"

    def captured(self, shard: str) -> Path:
        """Where states that were captured while generating wait for their shard, one file per sample.

        The files do not say which layers they hold, so those of other layers lie elsewhere.
        """
        print_ = fingerprint([self.synthetic_samples(shard).fingerprint, self.recipe.extraction.layers])
        return self.folder / "captured" / print_[:12] / shard

    def _place(self, asset: str, inputs: dict[str, Any], shard: str | None = None) -> Place:
        print_ = fingerprint(inputs)
        folder = self.folder / asset / print_[:12]
        return Place(folder / shard if shard else folder, asset, print_, inputs, shard)

    def target_model(self) -> Place:
        """The target's folder, or what points to it; a local one is observed by its content."""
        inputs = self.recipe.settings("target") | _content(self.recipe.target.path)
        return self._place("target_model", inputs)

    def base_draft(self) -> Place:
        """The pretrained draft to start from, for this target; a local one is observed by its content."""
        draft = self.recipe.base_draft
        inputs = self.recipe.settings("base_draft") | _content(draft.path if draft else None)
        return self._place("base_draft", {**inputs, "target": self._target()})

    def model_path(self) -> Path:
        """The folder of the target; raises MissingInput."""
        return _model_path(self.target_model())

    def base_draft_path(self) -> Path | None:
        """The folder of the base draft, where the recipe names one; raises MissingInput."""
        return _model_path(self.base_draft()) if self.recipe.base_draft else None

    def _target(self) -> str:
        return str(self.target_model().require().facts["model_fingerprint"])

    def prompts(self) -> Place:
        """The first `count` prompts of an order that sources, screening and seed fix."""
        return self._place("prompts", {**of_prompts(self.recipe, _source), "target": self._target()})

    def synthetic_samples(self, shard: str) -> Place:
        """One shard of samples; raises MissingInput without the prompts, whose shards it takes.

        The first one depends on how many of its prompts judge, too: the target answers those greedily.
        """
        facts = self.prompts().require().facts
        judges = len(facts["validation"]) if shard == self.recipe.prompts.shards[0] else 0
        inputs = {
            "prompts": facts["shards"][shard],
            "target": self._target(),
            **({"greedy": judges} if judges else {}),
            **of_samples(self.recipe),
        }
        return self._place("synthetic_samples", inputs, shard)

    def sample_audit(self) -> Place:
        """The verdict over all shards of the run, and the plan of their states."""
        samples = self.digests([self.synthetic_samples(shard) for shard in self.recipe.shards])
        return self._place("sample_audit", {"samples": samples, **of_audit(self.recipe)})

    def hidden_state_shards(self, shard: str) -> Place:
        """The hidden states of one shard of samples."""
        samples = self.synthetic_samples(shard).require().digest
        return self._place("hidden_state_shards", {"samples": samples, **of_states(self.recipe)}, shard)

    def vocabulary_map(self) -> Place:
        """The draft's vocabulary, counted over all samples of the run, as far as they are extracted."""
        inputs = {
            "samples": self.digests([self.synthetic_samples(shard) for shard in self.recipe.shards]),
            **of_vocabulary(self.recipe),
            "target": self._target(),
            "base_draft": self._base_draft(),
        }
        return self._place("vocabulary_map", inputs)

    def waves(self) -> tuple[list[tuple[str, ...]], int]:
        """The shards of each wave, and the number of passes; raises MissingInput without the audit's plan.

        One wave needs one pass only: its states stay.
        """
        if self.recipe.extraction.waves == 1:
            return [tuple(self.recipe.shards)], 1
        facts = self.sample_audit().require().facts
        waves = [tuple(wave) for wave in facts["waves"]]
        return waves, int(facts["passes"]) if len(waves) > 1 else 1

    def draft_checkpoint(self, plan: tuple[Sequence[Sequence[str]], int] | None = None) -> Place:
        """The trained draft. In waves it follows from what states are made of: they never all exist.

        `plan` are waves and passes, by default those of `waves`. The vocabulary counts by what is in
        its file: settings that lead to the same tokens train nothing anew.
        """
        waves, passes = plan or self.waves()
        states = [self.hidden_state_shards(shard) for shard in self.recipe.shards]
        inputs = {
            "states": self.digests(states)
            if len(waves) == 1
            else fingerprint([place.fingerprint for place in states]),
            **({"waves": waves, "passes": passes} if len(waves) > 1 else {}),
            "vocabulary": [one.sha256 for one in self.vocabulary_map().require().files],
            **of_training(self.recipe),
            "base_draft": self._base_draft(),
        }
        return self._place("draft_checkpoint", inputs)

    def acceptance_report(self) -> Place:
        """The measurement of the draft on the real server."""
        inputs = {
            "draft": self.draft_checkpoint().require().digest,
            **of_evaluation(self.recipe, _source),
            "target": self._target(),
        }
        return self._place("acceptance_report", inputs)

    def released_draft(self) -> Place:
        """The folder that others serve."""
        inputs = {
            "draft": self.draft_checkpoint().require().digest,
            "report": self.acceptance_report().require().digest,
            **of_release(self.recipe),
        }
        return self._place("released_draft", inputs)

    def released(self) -> Manifest | None:
        """The release, if everything on the way to it is there."""
        try:
            return self.released_draft().manifest()
        except MissingInput:
            return None

    def _base_draft(self) -> str | None:
        """By its content: the same draft may lie in another folder."""
        if self.recipe.base_draft is None:
            return None
        return str(self.base_draft().require().facts["model_fingerprint"])

    def digests(self, places: list[Place]) -> str:
        """One digest over the manifests of several places, all of which must be there."""
        return fingerprint([place.require().digest for place in places])

    def made(self, places: list[Place]) -> list[Manifest]:
        """The manifests of several places, all of which must be there."""
        return [place.require() for place in places]


def _content(folder: Path | None) -> dict[str, str]:
    return {"content": content_of_model(folder)} if folder is not None and folder.is_dir() else {}


def _model_path(place: Place) -> Path:
    """What the manifest says, which is relative to it for a model that lies in the place itself."""
    return place.folder / str(place.require().facts["model_path"])


def _source(settings: dict[str, Any]) -> dict[str, Any]:
    """A source by what it holds: a local file by its checksum, so that it may be moved."""
    path = settings.get("path")
    return settings if path is None else {**settings, "path": _checksum(Path(path))}


def _checksum(path: Path) -> str:
    if not path.is_file():
        raise BadInput(f"no file {path}, which the recipe names. Paths are relative to the recipe's folder.")
    status = path.stat()
    return _checksum_of_version(path, status.st_mtime_ns, status.st_size)


@cache
def _checksum_of_version(path: Path, _mtime_ns: int, _size: int) -> str:
    """One reading per state of a file: places are computed for each shard, and sources may be large."""
    return sha256_of_file(path)
