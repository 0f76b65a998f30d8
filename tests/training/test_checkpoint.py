"""Checkpoints as files: sealed, set aside by one process alone, and let go when they are read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.training.checkpoint import Checkpoints, TrainingState
from eagle3_pipeline.training.draft import trained_parameters
from eagle3_pipeline.training.optimizer import Optimizer
from eagle3_pipeline.training.random_state import random_state
from tests.training.tiny import draft, plan


def _optimizer(steps: int = 0) -> Optimizer:
    optimizer = Optimizer(trained_parameters(draft()), plan(Path()))
    for _ in range(steps):
        for one in optimizer.parameters.values():
            one.grad = one.detach().clone()
        optimizer.step(1.0)
    return optimizer


@pytest.fixture
def written(tmp_path: Path) -> Checkpoints:
    """Checkpoints of the steps 1 and 2, and the best weights."""
    checkpoints = Checkpoints(tmp_path, "f" * 64)
    checkpoints.tidy()
    optimizer = _optimizer(1)
    for step in (1, 2):
        checkpoints.save(optimizer, TrainingState(step=step, batch=step), [random_state()])
    checkpoints.save_best(optimizer.parameters, TrainingState(step=1, best=1.5))
    return checkpoints


def _another_batch(state: dict[str, Any]) -> None:
    state["progress"]["batch"] += 1


def _no_random(state: dict[str, Any]) -> None:
    del state["random"]


def _other_random(state: dict[str, Any]) -> None:
    state["random"][0]["torch"][9] ^= 1


@pytest.mark.parametrize("change", [_another_batch, _no_random, _other_random])
def test_a_state_that_is_not_as_it_was_written_is_never_gone_on_from(
    tmp_path: Path, written: Checkpoints, change: Callable[[dict[str, Any]], None]
) -> None:
    path = tmp_path / "step-00000002" / "state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    found = written.resume(_optimizer())
    assert found is not None
    assert (found.step, found.batch) == (1, 1)
    assert (tmp_path / "set-aside-step-00000002").exists()


def test_the_state_of_the_best_weights_is_sealed_too(tmp_path: Path, written: Checkpoints) -> None:
    assert written.verify_best().best == 1.5
    path = tmp_path / "best" / "state.json"
    path.write_text(path.read_text().replace("1.5", "2.5"))
    with pytest.raises(DamagedFile, match=r"best/state.json has the checksum .* not the one"):
        written.verify_best()


def test_only_the_first_process_sets_a_checkpoint_aside(tmp_path: Path, written: Checkpoints) -> None:
    (tmp_path / "step-00000002" / "weights.safetensors").write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DamagedFile, match="The first process found it sound"):
        written.resume(_optimizer(), rank=1)
    assert sorted(tmp_path.iterdir()) == before
    found = written.resume(_optimizer(), rank=0)
    assert found is not None
    assert found.step == 1
    assert (tmp_path / "set-aside-step-00000002").exists()


def test_nothing_of_a_checkpoint_is_held_once_it_is_read(tmp_path: Path, written: Checkpoints) -> None:
    optimizer = _optimizer()
    assert written.resume(optimizer) is not None
    assert optimizer.tensors()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
