"""Checkpoints of a training run: complete or not there, verified when read, few.

    checkpoints/
        step-00000120/         latest two, by step
            weights.safetensors      trained parameters, float32
            optimizer.safetensors    AdamW's moments, float32, and its step counts
            state.json               position, random state, fingerprint, checksums of the two
        step-00000240/
        best/                  weights.safetensors and state.json of the best validation so far
        .step-00000360.tmp/    being written; removed by the next writer

A folder gets its name when everything in it is on the disk. The target's frozen tensors are in none.
"""

import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle3_pipeline.durable_files import (
    fsync_file,
    fsync_folder,
    require_free_bytes,
    sha256_of_file,
    write_json,
)
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.provenance import fingerprint

logger = logging.getLogger(__name__)

KEPT = 2
_NAME = re.compile(r"step-(\d+)")
WEIGHTS_NAME = "weights.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "state.json"


@dataclass
class TrainingState:
    """Where a run stands; part of each checkpoint. `best` is the best simulated acceptance length so far."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that are done."""
    tokens: int = 0
    """Rows trained on, all epochs together."""
    seconds: float = 0.0
    """Time spent in training steps, reading included, over all processes that worked on the run."""
    waited: float = 0.0
    """Of these seconds, those in which a step stood still for its batch to be read."""
    best: float = 0.0
    best_step: int = 0
    validation: list[dict[str, Any]] = field(default_factory=list)
    """One record per finished epoch."""


class Checkpoints:
    """The checkpoints of one run below one folder."""

    def __init__(self, folder: Path, identity: str) -> None:
        """Use `folder`; checkpoints of another identity (of the plan) are never read."""
        self._folder = folder
        self._identity = identity
        folder.mkdir(parents=True, exist_ok=True)

    def save(
        self, parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, at: TrainingState
    ) -> Path:
        """Write one checkpoint, then remove all but the latest two; raises NotEnoughRoom."""
        weights = {name: one.detach().float().cpu().contiguous() for name, one in parameters.items()}
        final = self._folder / f"step-{at.step:08d}"
        tensors = {WEIGHTS_NAME: weights, OPTIMIZER_NAME: _optimizer_tensors(parameters, optimizer)}
        self._write(final, tensors, at, {"random": torch.get_rng_state().tolist()})
        for old in self._found()[KEPT:]:
            shutil.rmtree(old)
        return final

    def save_best(self, parameters: dict[str, torch.nn.Parameter], at: TrainingState) -> None:
        """Keep these weights as the best so far."""
        weights = {name: one.detach().float().cpu().contiguous() for name, one in parameters.items()}
        self._write(self._folder / "best", {WEIGHTS_NAME: weights}, at, {})

    def load_best(self, parameters: dict[str, torch.nn.Parameter]) -> TrainingState:
        """Put the best weights into the model; raises DamagedFile."""
        state = self._verified(self._folder / "best", (WEIGHTS_NAME,))
        _load_weights(self._folder / "best" / WEIGHTS_NAME, parameters)
        return TrainingState(**state["progress"])

    def resume(
        self, parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> TrainingState | None:
        """Go on from the newest sound checkpoint; damaged ones are named and passed over. None: start new."""
        for path in self._found():
            try:
                state = self._verified(path, (WEIGHTS_NAME, OPTIMIZER_NAME))
                _load_weights(path / WEIGHTS_NAME, parameters)
            except DamagedFile as error:
                logger.warning("checkpoint %s is passed over and set aside: %s", path.name, error)
                self._set_aside(path)
                continue
            _load_optimizer(load_file(path / OPTIMIZER_NAME), parameters, optimizer)
            torch.set_rng_state(torch.tensor(state["random"], dtype=torch.uint8))
            return TrainingState(**state["progress"])
        return None

    def digest_of_newest(self) -> str:
        """Identity of the newest checkpoint, after it was read back; raises DamagedFile."""
        newest = self._found()[0]
        return fingerprint(self._verified(newest, (WEIGHTS_NAME, OPTIMIZER_NAME)))

    def _set_aside(self, path: Path) -> None:
        """Rename it, so that it never counts as one of the latest again."""
        aside = path.with_name(f"set-aside-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)

    def _found(self) -> list[Path]:
        """Folders of checkpoints, the newest first, by number."""
        numbered = [
            (int(match[1]), path) for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name))
        ]
        return [path for _, path in sorted(numbered, reverse=True)]

    def _write(
        self,
        final: Path,
        tensors: dict[str, dict[str, torch.Tensor]],
        at: TrainingState,
        more: dict[str, Any],
    ) -> None:
        size = sum(one.numel() * one.element_size() for group in tensors.values() for one in group.values())
        require_free_bytes(self._folder, size, f"checkpoint {final.name}")
        partial = self._folder / f".{final.name}.tmp"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        checksums = {}
        for name, group in tensors.items():
            save_file(group, partial / name)
            fsync_file(partial / name)
            checksums[name] = sha256_of_file(partial / name)
        state = {"fingerprint": self._identity, "progress": asdict(at), "checksums": checksums, **more}
        write_json(partial / STATE_NAME, state)
        self._replace(partial, final)

    def _replace(self, partial: Path, final: Path) -> None:
        """Give the folder its name. A kill between the renames leaves `.old`, from which it comes back."""
        old = self._folder / f".{final.name}.old"
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        partial.rename(final)
        fsync_folder(self._folder)
        shutil.rmtree(old, ignore_errors=True)

    def _verified(self, path: Path, names: tuple[str, ...]) -> dict[str, Any]:
        old = self._folder / f".{path.name}.old"
        if not path.exists() and old.exists():
            old.rename(path)
        try:
            state: dict[str, Any] = json.loads((path / STATE_NAME).read_text())
            TrainingState(**state["progress"])
            found = {name: sha256_of_file(path / name) for name in names}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedFile(f"{path} is incomplete or no checkpoint ({error})") from error
        if state["fingerprint"] != self._identity:
            raise DamagedFile(f"{path} is of another training plan ({str(state['fingerprint'])[:12]})")
        for name, checksum in found.items():
            if state["checksums"].get(name) != checksum:
                raise DamagedFile(
                    f"{path / name} has the checksum {checksum[:12]}, not the one it was written with"
                )
        return state


def _load_weights(path: Path, parameters: dict[str, torch.nn.Parameter]) -> None:
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    shapes = {name: tuple(one.shape) for name, one in parameters.items()}
    if {name: tuple(one.shape) for name, one in weights.items()} != shapes:
        raise DamagedFile(
            f"{path} has other tensors than the draft: {sorted(set(weights) ^ set(shapes))[:5]}"
        )
    with torch.no_grad():
        for name, one in parameters.items():
            one.copy_(weights[name])


def _optimizer_tensors(
    parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """AdamW's state by parameter name: `<name>.exp_avg`, `<name>.exp_avg_sq`, `<name>.step`."""
    tensors = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = torch.as_tensor(value).detach().float().cpu().contiguous().clone()
    return tensors


def _load_optimizer(
    tensors: dict[str, torch.Tensor],
    parameters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    for full_name, value in tensors.items():
        name, key = full_name.rsplit(".", 1)
        # The step count stays where AdamW made it (the CPU, unless fused on a GPU); moments go to their
        # parameter.
        parameter = parameters[name]
        on_device = key != "step" or bool(optimizer.defaults.get("fused"))
        optimizer.state[parameter][key] = value.to(parameter.device) if on_device else value
