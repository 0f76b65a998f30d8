"""Checkpoints of a training run: complete or not there, verified when read, few.

    checkpoints/
        step-00000120/         latest two, by step
            weights.safetensors      trained parameters, float32
            optimizer.safetensors    the optimizer's moments and step counts, float32
            state.json               position, random states, fingerprint, checksums, one of itself
        step-00000240/
        best/                  weights.safetensors and state.json of the best validation so far
        .step-00000360.tmp/    being written; removed at the next start
        set-aside-step-00000120/   its checksums are not those it was written with; never read again

A folder gets its name when everything in it is on the disk. The target's frozen tensors are in none. Of
processes that train together the first one writes; it holds the random states of all.
"""

import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle3_pipeline.durable_files import fsync_folder, require_free_bytes, sha256_of_file, write_json
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.tensor_file import write_tensors
from eagle3_pipeline.training.optimizer import Optimizer
from eagle3_pipeline.training.plan import FULL_DISK
from eagle3_pipeline.training.random_state import restore_random_state
from eagle3_pipeline.training.weights import load_weights, weight_tensors

logger = logging.getLogger(__name__)

KEPT = 2
_NAME = re.compile(r"step-(\d+)")
WEIGHTS_NAME = "weights.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "state.json"
_SEALED = ("fingerprint", "progress", "checksums", "random")


@dataclass
class TrainingState:
    """Where a run stands; part of each checkpoint. `best` is the best simulated acceptance length so far."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Steps of the epoch that are done, each of one batch or several."""
    batches: str = ""
    """Fingerprint of all batches of the epoch: `batch` counts in these."""
    tokens: int = 0
    """Rows trained on, all epochs together."""
    seconds: float = 0.0
    """Time spent in training steps, reading included, over all processes that worked on the run."""
    waited: float = 0.0
    """Of these seconds, those in which a step stood still for its batch to be read."""
    best: float = 0.0
    best_step: int = 0
    lost_best: bool = False
    """Whether the best weights were once found damaged, and replaced by those of the moment."""
    stopped: bool = False
    """Whether `training.patience` has ended the training before its last epoch."""
    validation: list[dict[str, Any]] = field(default_factory=list)
    """One record per finished epoch."""

    def epochs_since_best(self) -> int:
        """Judgements since the one of the best weights."""
        return sum(record["step"] > self.best_step for record in self.validation)


class Checkpoints:
    """The checkpoints of one run below one folder."""

    def __init__(self, folder: Path, identity: str) -> None:
        """Use `folder`, with `identity`, the plan's fingerprint: checkpoints of another are never read."""
        self._folder = folder
        self._identity = identity

    def tidy(self) -> None:
        """Remove or bring back what a kill at any point left; only for the one process that writes here."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for partial in self._folder.glob(".*.tmp"):
            shutil.rmtree(partial)
        for old in self._folder.glob(".*.old"):
            final = self._folder / old.name.removeprefix(".").removesuffix(".old")
            if final.exists():
                shutil.rmtree(old)
            else:  # the kill came between the two renames of _replace
                old.rename(final)

    def save(self, optimizer: Optimizer, at: TrainingState, random: list[dict[str, Any]]) -> Path:
        """Write one checkpoint, then remove all but the latest two up to it; raises NotEnoughRoom.

        `random` are the random states of all processes, by rank.
        """
        final = self._path(at.step)
        tensors = {WEIGHTS_NAME: weight_tensors(optimizer.parameters), OPTIMIZER_NAME: optimizer.tensors()}
        self._write(final, tensors, at, random)
        for old in [path for path in self._found() if _number(path) <= at.step][KEPT:]:
            shutil.rmtree(old)
        return final

    def rewind(self, optimizer: Optimizer, at: TrainingState, random: list[dict[str, Any]]) -> None:
        """Write one checkpoint and remove those of later steps, from which nothing may go on."""
        self.save(optimizer, at, random)
        later = [path for path in self._found() if _number(path) > at.step]
        for path in reversed(later):  # the latest one last: a kill in between finds it, and rewinds again
            shutil.rmtree(path)

    def save_best(self, parameters: dict[str, torch.nn.Parameter], at: TrainingState) -> None:
        """Keep these weights as the best so far."""
        self._write(self._folder / "best", {WEIGHTS_NAME: weight_tensors(parameters)}, at, [])

    def load_best(self, parameters: dict[str, torch.nn.Parameter]) -> TrainingState:
        """Put the best weights into the model; raises DamagedFile."""
        at = self.verify_best()
        load_weights(self._folder / "best" / WEIGHTS_NAME, parameters)
        return at

    def verify_best(self) -> TrainingState:
        """Read the best weights back; raises DamagedFile."""
        path = self._folder / "best"
        return self._progress(path, self._verified(path, (WEIGHTS_NAME,)))

    def resume(self, optimizer: Optimizer, rank: int = 0) -> TrainingState | None:
        """Go on from the newest sound checkpoint; others are named and passed over. None: start new.

        `rank` is this process's place among those that train together. Only what is damaged is set aside, by
        the first one; others, which come after it, raise DamagedFile. Raises OSError where the disk does not
        let one be read: it may the next time.
        """
        for path in self._found():
            try:
                state = self._verified(path, (WEIGHTS_NAME, OPTIMIZER_NAME))
            except DamagedFile as error:
                if rank:
                    raise DamagedFile(f"{error}. The first process found it sound: start again") from error
                logger.warning("checkpoint %s is passed over and set aside: %s", path.name, error)
                self._set_aside(path)
                continue
            try:
                at = self._progress(path, state)
                load_weights(path / WEIGHTS_NAME, optimizer.parameters)
            except DamagedFile as error:  # as it was written, but not by this training
                logger.warning("checkpoint %s is passed over: %s", path.name, error)
                continue
            optimizer.load(load_file(path / OPTIMIZER_NAME))
            if rank < len(state["random"]):  # less than before may have trained together
                restore_random_state(state["random"][rank])
            return at
        return None

    def digest(self, at: TrainingState) -> str:
        """Identity of the checkpoint of this state, after it was read back; raises DamagedFile."""
        try:
            return fingerprint(self._verified(self._path(at.step), (WEIGHTS_NAME, OPTIMIZER_NAME)))
        except DamagedFile as error:
            raise DamagedFile(
                f"{error}. No states were deleted: start it again, it goes on at the checkpoint before."
            ) from error

    def nothing_left(self, turn: int) -> DamagedFile:
        """The error for a turn that finds no checkpoint of the one before, with what is there instead."""
        found = ", ".join(sorted(path.name for path in self._folder.glob("*step-*"))) or "nothing"
        training = self._folder.parent
        return DamagedFile(
            f"no sound checkpoint of the end of turn {turn - 1} in {self._folder}, and the states that it "
            f"was trained on are deleted. Found: {found}; {training}/training.log says what is wrong. "
            "Where you have a sound copy, put it there as step-...; else move "
            f"{training} away: all waves are then extracted and trained on again."
        )

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _set_aside(self, path: Path) -> None:
        """Rename it, so that it never counts as one of the latest again."""
        aside = path.with_name(f"set-aside-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)

    def _found(self) -> list[Path]:
        """Folders of checkpoints, the newest first, by number."""
        found = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=_number, reverse=True)

    def _write(
        self,
        final: Path,
        tensors: dict[str, dict[str, torch.Tensor]],
        at: TrainingState,
        random: list[dict[str, Any]],
    ) -> None:
        size = sum(one.numel() * one.element_size() for group in tensors.values() for one in group.values())
        require_free_bytes(self._folder, size, f"checkpoint {final.name}", FULL_DISK)
        partial = self._folder / f".{final.name}.tmp"
        partial.mkdir()
        try:
            checksums = {}
            for name, group in tensors.items():
                write_tensors(group, partial / name)
                checksums[name] = sha256_of_file(partial / name)
            state = dict(zip(_SEALED, (self._identity, asdict(at), checksums, random), strict=True))
            write_json(partial / STATE_NAME, {**state, "checksum": fingerprint(state)})
        except BaseException:
            shutil.rmtree(partial)
            raise
        self._replace(partial, final)

    def _replace(self, partial: Path, final: Path) -> None:
        """Give the folder its name. A kill between the renames leaves `.old`, from which it comes back."""
        old = self._folder / f".{final.name}.old"
        if final.exists():
            final.rename(old)
        partial.rename(final)
        fsync_folder(self._folder)
        shutil.rmtree(old, ignore_errors=True)

    def _verified(self, path: Path, names: tuple[str, ...]) -> dict[str, Any]:
        """The state of a checkpoint whose files are as they were written; raises DamagedFile and OSError."""
        try:
            state: dict[str, Any] = json.loads((path / STATE_NAME).read_text())
            wanted = {name: str(state["checksums"][name]) for name in names} | {STATE_NAME: state["checksum"]}
            found = {STATE_NAME: fingerprint({name: state[name] for name in _SEALED})}
            found |= {name: sha256_of_file(path / name) for name in names}
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
            raise DamagedFile(f"{path} is incomplete or no checkpoint ({error})") from error
        for name, checksum in found.items():
            if wanted[name] != checksum:
                raise DamagedFile(
                    f"{path / name} has the checksum {checksum[:12]}, not the one it was written with"
                )
        return state

    def _progress(self, path: Path, state: dict[str, Any]) -> TrainingState:
        if (found := state.get("fingerprint")) != self._identity:
            raise DamagedFile(f"{path} is of another training plan ({str(found)[:12]})")
        try:
            return TrainingState(**state["progress"])
        except (KeyError, TypeError) as error:
            raise DamagedFile(f"{path} was written by another version of this code ({error})") from error


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
