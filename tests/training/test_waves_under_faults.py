"""Training wave by wave under kills, full disks and damage: the same weights, and nothing lost."""

import json
import math
import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from eagle3_pipeline import tensor_file, waves
from eagle3_pipeline.errors import DamagedFile, NotEnoughRoom
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Place
from eagle3_pipeline.shards.consumption import consumption
from eagle3_pipeline.training import meter, process
from eagle3_pipeline.training.loop import Training as Loop
from eagle3_pipeline.training.training import train_draft
from tests.training.world import (
    go_through,
    in_this_process,
    left_over,
    make_lineage,
    plan_waves,
    three_waves,
    write_states,
)

_KILLED = 9


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)


def _draft(lineage: Lineage) -> bytes:
    return (lineage.draft_checkpoint().folder / "draft" / "model.safetensors").read_bytes()


def test_a_damaged_checkpoint_of_a_finished_turn_is_no_reason_to_start_anew_in_silence(
    tmp_path: Path, tiny_llama: Path
) -> None:
    lineage = three_waves(tmp_path, tiny_llama)
    first, second = lineage.recipe.shards[:2]
    write_states(lineage, [first])
    train_draft(lineage, nullcontext())
    write_states(lineage, [second])
    for path in (lineage.draft_checkpoint().folder / "checkpoints").glob("step-*/weights.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(DamagedFile, match=r"no sound checkpoint of .* turn 0 .*Found: set-aside-step-"):
        train_draft(lineage, nullcontext())
    assert consumption(lineage.hidden_state_shards(second).folder) is None


def test_a_disk_that_cannot_take_the_judges_is_known_before_they_are_copied(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = three_waves(tmp_path, tiny_llama, storage={"keep_free_gib": 3.0})
    write_states(lineage, [lineage.recipe.shards[0]])
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 * 2**30))
        with pytest.raises(
            NotEnoughRoom, match=r"2 validation samples, with storage.keep_free_gib, needs 3.0"
        ):
            train_draft(lineage, nullcontext())
    assert not list((lineage.draft_checkpoint().folder / "validation").glob("*part-*"))
    assert isinstance(train_draft(lineage, nullcontext()), waves.TurnRecord)


def test_a_damaged_copy_of_the_judges_names_a_way_out_that_works(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = three_waves(tmp_path, tiny_llama)
    first, second = lineage.recipe.shards[:2]
    write_states(lineage, [first])
    copy = lineage.draft_checkpoint().folder / "validation"

    def damage() -> None:
        (copy / "part-00000.safetensors").write_bytes(b"")

    with monkeypatch.context() as patch:
        patch.setattr(process, "build_model", _raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_draft(lineage, nullcontext())
    damage()
    with pytest.raises(DamagedFile, match=f"has 0 bytes, expected .* Delete {copy} and start again"):
        train_draft(lineage, nullcontext())
    shutil.rmtree(copy)
    train_draft(lineage, nullcontext())
    damage()
    write_states(lineage, [second])
    with pytest.raises(DamagedFile, match=f"expected .* Move {copy.parent} away: all waves"):
        train_draft(lineage, nullcontext())
    copy.parent.rename(tmp_path / "away")
    go_through(lineage)
    assert lineage.draft_checkpoint().manifest() is not None


def _raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_disk_that_fills_up_is_said_to_be_full_and_leaves_nothing_half_written(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = three_waves(tmp_path, tiny_llama)
    write_states(lineage, [lineage.recipe.shards[0]])

    def full(tensors: Any, path: Path, _: Any) -> None:
        path.write_bytes(b"what fitted")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "save_file", full)
        with pytest.raises(
            NotEnoughRoom, match=r"is full .*No space left.*materialise draft_checkpoint again"
        ):
            train_draft(lineage, nullcontext())
    checkpoints = lineage.draft_checkpoint().folder / "checkpoints"
    assert list(checkpoints.iterdir()) == []
    assert isinstance(train_draft(lineage, nullcontext()), waves.TurnRecord)


def test_best_weights_that_are_damaged_when_a_wave_ends_are_replaced_before_its_states_go(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = three_waves(tmp_path, tiny_llama)
    best = lineage.draft_checkpoint().folder / "checkpoints" / "best" / "weights.safetensors"
    run = Loop.run

    def damaging(self: Loop) -> Any:
        state = run(self)
        best.write_bytes(best.read_bytes()[:-1])
        return state

    write_states(lineage, [lineage.recipe.shards[0]])
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", damaging)
        record = train_draft(lineage, nullcontext())
    assert isinstance(record, waves.TurnRecord)
    assert record.facts["lost_best"] is True
    go_through(lineage)
    assert lineage.draft_checkpoint().require().facts["lost_best"] is True


def test_checkpoints_of_one_wave_that_a_kill_left_go_before_the_measurement(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = make_lineage(tmp_path, tiny_llama, waves="auto")
    plan_waves(lineage, list(lineage.recipe.shards))
    write_states(lineage, list(lineage.recipe.shards))
    finish = Place.finish

    def killed(self: Place, *args: Any) -> None:
        finish(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Place, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            train_draft(lineage, nullcontext())
    folder = lineage.draft_checkpoint().folder
    assert (folder / "checkpoints").exists()
    assert waves.next_turn(lineage) is None
    go_through(lineage)
    assert not (folder / "checkpoints").exists()


def _die_at(number: int) -> None:
    """End this process, as kill -9 would, before the `number`-th operation that changes the disk."""
    left = number

    def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(_KILLED)
            return operation(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "rename", "unlink", "mkdir"):
        setattr(os, name, dying(getattr(os, name)))


def _life(lineage: Lineage, operations: int) -> int:
    """Go through the waves in a process of its own that dies after so many operations; its exit status."""
    if not (pid := os.fork()):
        status = 1
        try:
            _die_at(operations)
            go_through(lineage)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _require_nothing_lost(lineage: Lineage) -> None:
    """States that are gone were learned from by a checkpoint that is there, and their shard says so."""
    folder = lineage.draft_checkpoint().folder
    done = waves.records(folder)
    for shard in lineage.recipe.shards:
        place = lineage.hidden_state_shards(shard)
        manifest = place.manifest()
        if manifest is None or all((place.folder / one.path).exists() for one in manifest.files):
            continue
        found = consumption(place.folder)
        if found is None:  # about to be made again
            assert done[-1].number >= 2
            continue
        assert done[found.turn].checkpoint == found.by
        assert done[found.turn].consumed[shard] == manifest.digest
    if done and not (folder / "manifest.json").exists():
        assert list((folder / "checkpoints").glob("step-*/state.json"))
        assert (folder / "validation" / "manifest.json").exists()


def _live_until_done(lineage: Lineage, lifetimes: Sequence[int]) -> int:
    kills = 0
    for operations in lifetimes:
        status = _life(lineage, operations)
        _require_nothing_lost(lineage)
        if status == 0:
            return kills
        assert status == _KILLED
        kills += 1
    raise AssertionError(f"not done after {kills} lives")


def _metrics(lineage: Lineage) -> list[dict[str, Any]]:
    """The events of a training without what a clock says."""
    lines = (lineage.draft_checkpoint().folder / "metrics.jsonl").read_text().splitlines()
    clock = {"tokens_per_second", "waited_s", "seconds_left"}
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def test_kills_anywhere_lose_nothing_and_end_with_the_same_weights(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "_REPORT_EVERY_S", math.inf)
    changes: dict[str, Any] = {"passes": 2, "training": {"tokens_per_step": 128}}
    whole = three_waves(tmp_path / "whole", tiny_llama, **changes)
    assert _life(whole, 1 << 30) == 0
    killed = three_waves(tmp_path / "killed", tiny_llama, **changes)
    chance = random.Random(0)
    kills = _live_until_done(killed, [chance.randrange(10, 90) for _ in range(200)])
    assert kills >= 5
    assert _draft(killed) == _draft(whole)
    assert _metrics(killed) == _metrics(whole)
    assert left_over(killed) == left_over(whole) == []
