"""Training wave by wave: the same weights wherever it is killed, and nothing deleted before its time."""

import json
import os
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline import waves
from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.shards.consumption import consumption
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.training import training
from eagle3_pipeline.training.training import train_draft
from tests.training.world import go_through, in_this_process, make_lineage, plan_waves, write_states

_KILLED = 9


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)


def _waves(tmp_path: Path, tiny_llama: Path, **changes: Any) -> Lineage:
    lineage = make_lineage(
        tmp_path, tiny_llama, **{"waves": 3, "training": {"tokens_per_step": 64}, **changes}
    )
    plan_waves(lineage)
    return lineage


def _draft(lineage: Lineage) -> bytes:
    return (lineage.draft_checkpoint().folder / "draft" / "model.safetensors").read_bytes()


def test_each_call_trains_one_wave_and_deletes_its_states_and_the_last_one_makes_the_draft(
    tmp_path: Path, tiny_llama: Path
) -> None:
    lineage = _waves(tmp_path, tiny_llama)
    folder = lineage.draft_checkpoint().folder
    consumed: list[str] = []
    for number, shard in enumerate(lineage.recipe.shards):
        assert waves.due(lineage, [shard]) == [shard]
        write_states(lineage, [shard])
        digest = lineage.hidden_state_shards(shard).require().digest
        made = train_draft(lineage, nullcontext())
        consumed.append(shard)
        record = waves.read_record(folder / f"turn-{number:04d}.json")
        assert record.consumed == {shard: digest}
        for one in consumed:
            place = lineage.hidden_state_shards(one)
            assert place.manifest() is not None
            assert not list(place.folder.glob("part-*"))
        found = consumption(lineage.hidden_state_shards(shard).folder)
        assert found is not None
        assert (found.by, found.turn) == (record.checkpoint, number)
        if number < 2:
            assert made == record
            assert record.name == f"wave {number + 1} of 3"
            assert (folder / "validation" / "manifest.json").exists()
            assert not (folder / "draft").exists()
    assert isinstance(made, Manifest)
    assert made.digest == record.checkpoint
    assert list(made.facts["waves"]) == ["wave 1 of 3", "wave 2 of 3", "wave 3 of 3"]
    assert not (folder / "validation").exists()
    assert not (folder / "checkpoints").exists()
    assert waves.next_turn(lineage) is None
    assert train_draft(lineage, nullcontext()) == made


def test_the_rate_goes_once_through_its_schedule_and_each_epoch_is_judged(
    tmp_path: Path, tiny_llama: Path
) -> None:
    lineage = _waves(tmp_path, tiny_llama, passes=2, training={"tokens_per_step": 64, "epochs": 4})
    go_through(lineage)
    folder = lineage.draft_checkpoint().folder
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [event["epoch"] for event in events if event["event"] == "epoch"]
    assert epochs == list(range(12))  # two passes of two epochs over three waves
    facts = lineage.draft_checkpoint().require().facts
    assert facts["epochs"] == 4
    assert facts["steps"] == events[-1]["step"] == max(event["steps"] for event in events if "steps" in event)
    assert list(facts["waves"])[3] == "wave 1 of 3, pass 2 of 2"


def test_samples_without_usable_states_shorten_a_wave_but_not_the_schedule(
    tmp_path: Path, tiny_llama: Path
) -> None:
    lineage = _waves(tmp_path, tiny_llama)
    shard = lineage.recipe.shards[0]
    write_states(lineage, [shard], leave_out=frozenset(f"{shard}-{n}-t0" for n in (1, 2, 3, 5, 6)))
    record = train_draft(lineage, nullcontext())
    assert isinstance(record, waves.TurnRecord)
    plan = json.loads((lineage.draft_checkpoint().folder / "samples.json").read_text())
    assert plan["sizes"] == [8, 8, 8]
    go_through(lineage)
    steps = lineage.draft_checkpoint().require().facts["steps"]
    whole = _waves(tmp_path / "whole", tiny_llama)
    go_through(whole)
    assert whole.draft_checkpoint().require().facts["steps"] == steps


def test_validation_samples_outlast_their_wave_unchanged(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = _waves(tmp_path, tiny_llama)
    shard = lineage.recipe.shards[0]
    write_states(lineage, [shard])
    reader = ShardReader([lineage.hidden_state_shards(shard).folder])
    before = {name: reader[at]["hidden_states"].clone() for at, name in enumerate(reader.sample_ids)}
    train_draft(lineage, nullcontext())
    kept = ShardReader([lineage.draft_checkpoint().folder / "validation"])
    assert len(kept) == 2  # a tenth of 24
    assert all(before[name].equal(kept[at]["hidden_states"]) for at, name in enumerate(kept.sample_ids))


def test_a_turn_without_its_states_is_refused_by_name(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = _waves(tmp_path, tiny_llama)
    with pytest.raises(MissingInput, match="hidden_state_shards p8-s000 is not made yet"):
        train_draft(lineage, nullcontext())


def test_a_damaged_checkpoint_of_a_finished_turn_is_no_reason_to_start_anew_in_silence(
    tmp_path: Path, tiny_llama: Path
) -> None:
    lineage = _waves(tmp_path, tiny_llama)
    first, second = lineage.recipe.shards[:2]
    write_states(lineage, [first])
    train_draft(lineage, nullcontext())
    write_states(lineage, [second])
    for path in (lineage.draft_checkpoint().folder / "checkpoints").glob("step-*/weights.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(DamagedFile, match="no sound checkpoint of the end of turn 0"):
        train_draft(lineage, nullcontext())
    assert consumption(lineage.hidden_state_shards(second).folder) is None


def test_a_second_run_that_waited_for_the_gpu_trains_nothing_again(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = _waves(tmp_path, tiny_llama)
    write_states(lineage, [lineage.recipe.shards[0]])

    class Lease(nullcontext[None]):
        def __enter__(self) -> None:
            if not list(lineage.draft_checkpoint().folder.glob("turn-*")):
                train_draft(lineage, nullcontext())

    record = train_draft(lineage, Lease())
    assert isinstance(record, waves.TurnRecord)
    assert record.number == 0


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


def test_kills_anywhere_lose_nothing_and_end_with_the_same_weights(tmp_path: Path, tiny_llama: Path) -> None:
    changes: dict[str, Any] = {"passes": 2, "training": {"tokens_per_step": 128}}
    whole = _waves(tmp_path / "whole", tiny_llama, **changes)
    assert _life(whole, 1 << 30) == 0
    killed = _waves(tmp_path / "killed", tiny_llama, **changes)
    chance = random.Random(0)
    kills = _live_until_done(killed, [chance.randrange(10, 90) for _ in range(200)])
    assert kills >= 5
    assert _draft(killed) == _draft(whole)
    assert training.loss_curve(killed.draft_checkpoint().folder / "metrics.jsonl")["steps"][-1] > 0
