"""Training wave by wave: the same weights wherever it is killed, and nothing deleted before its time."""

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
import torch
from safetensors import SafetensorError

from eagle3_pipeline import tensor_file, waves
from eagle3_pipeline.errors import DamagedFile, MissingInput, NotEnoughRoom, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.recipe.training import Rates, Training
from eagle3_pipeline.samples.sample import prompt_id_of
from eagle3_pipeline.shards.consumption import consumption
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.training import meter, process
from eagle3_pipeline.training.batches import Split
from eagle3_pipeline.training.loop import Training as Loop
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.training.schedule import Schedule, make_schedule, rate_share
from eagle3_pipeline.training.training import train_draft
from eagle3_pipeline.training.wave_samples import WaveSamples, write_wave_samples
from tests.training.world import (
    go_through,
    in_this_process,
    left_over,
    make_lineage,
    plan_waves,
    write_states,
)

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


def _record_rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rate of each optimizer step from now on."""
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def recording(self: torch.optim.AdamW, *args: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    return rates


def test_the_rate_goes_once_through_its_schedule_and_each_epoch_is_judged(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = _waves(tmp_path, tiny_llama, passes=2, training={"tokens_per_step": 64, "epochs": 4})
    rates = _record_rates(monkeypatch)
    go_through(lineage)
    settings = lineage.recipe.training
    assert rates == [
        settings.learning_rate * rate_share(step, len(rates), settings.warmup_share)
        for step in range(len(rates))
    ]
    folder = lineage.draft_checkpoint().folder
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [event["epoch"] for event in events if event["event"] == "epoch"]
    assert epochs == list(range(12))  # two passes of two epochs over three waves
    facts = lineage.draft_checkpoint().require().facts
    assert facts["epochs"] == 4
    assert (
        facts["steps"]
        == len(rates)
        == events[-1]["step"]
        == max(event["steps"] for event in events if "steps" in event)
    )
    assert list(facts["waves"])[3] == "wave 1 of 3, pass 2 of 2"


def test_samples_without_usable_states_shorten_a_wave_but_not_the_schedule(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = _waves(tmp_path, tiny_llama)
    rates = _record_rates(monkeypatch)
    shard = lineage.recipe.shards[0]
    write_states(lineage, [shard], leave_out=frozenset(f"{shard}-{n}-t0" for n in (1, 2, 3, 5, 6)))
    record = train_draft(lineage, nullcontext())
    assert isinstance(record, waves.TurnRecord)
    plan = json.loads((lineage.draft_checkpoint().folder / "samples.json").read_text())
    assert plan["sizes"] == [8, 8, 8]
    go_through(lineage)
    facts, steps = lineage.draft_checkpoint().require().facts, len(rates)
    whole = _waves(tmp_path / "whole", tiny_llama)
    go_through(whole)
    of_whole, steps_of_whole = whole.draft_checkpoint().require().facts, len(rates) - steps
    assert of_whole["steps"] == facts["steps"] == steps_of_whole > steps
    assert of_whole["tokens"] > facts["tokens"]
    assert rates[steps - 1] == rates[-1]  # the end of the cosine


def _judges(lineage: Lineage) -> list[str]:
    """Ids of the samples that are planned to judge."""
    path = lineage.storage_root / "planned.json"
    write_wave_samples(lineage, lineage.waves()[0], path)
    samples = WaveSamples.read(path)
    prompts = lineage.prompts().require().facts["validation"]
    return [name for name in samples.names if prompt_id_of(name) in prompts]


def test_every_turn_is_judged_by_the_same_samples_and_none_of_them_ever_trains(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = _waves(tmp_path, tiny_llama, passes=2)
    first = lineage.recipe.shards[0]
    judges = _judges(lineage)
    assert len(judges) == 2
    seen: list[tuple[set[str], set[str]]] = []

    def watched(plan: TrainingPlan, split: Split, is_there: Callable[[int], bool]) -> Schedule:
        assert plan.samples is not None
        names = WaveSamples.read(Path(plan.samples)).names
        schedule = make_schedule(plan, split, is_there)
        steps = [step for epoch in schedule.epochs.values() for step in epoch]
        trained = {names[one] for step in steps for batch in step for one in batch}
        seen.append(({names[one] for one in schedule.validation}, trained))
        return schedule

    monkeypatch.setattr(process, "make_schedule", watched)
    write_states(lineage, [first], leave_out=frozenset(judges[:1]))  # in the second pass it is usable
    train_draft(lineage, nullcontext())
    go_through(lineage)
    assert [judging for judging, _ in seen] == [{judges[1]}] * 6
    assert not set(judges) & set.union(*(trained for _, trained in seen))
    assert lineage.draft_checkpoint().require().facts["judges"] == 1


def test_validation_samples_outlast_their_wave_unchanged(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = _waves(tmp_path, tiny_llama)
    shard = lineage.recipe.shards[0]
    write_states(lineage, [shard])
    reader = ShardReader([lineage.hidden_state_shards(shard).folder])
    before = {name: reader[at]["hidden_states"].clone() for at, name in enumerate(reader.sample_ids)}
    train_draft(lineage, nullcontext())
    kept = ShardReader([lineage.draft_checkpoint().folder / "validation"])
    assert len(kept) == 2
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
    with pytest.raises(DamagedFile, match=r"no sound checkpoint of .* turn 0 .*Found: set-aside-step-"):
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


def test_a_run_that_is_repeated_or_comes_late_gets_the_record_of_its_wave_and_trains_nothing(
    tmp_path: Path, tiny_llama: Path
) -> None:
    lineage = _waves(tmp_path, tiny_llama, passes=2)
    first, second, third = lineage.recipe.shards
    for number, shard in enumerate((first, second, third)):
        write_states(lineage, waves.due(lineage, [shard]))
        record = train_draft(lineage, nullcontext(), [shard])
        assert isinstance(record, waves.TurnRecord)
        assert record.number == number
        assert waves.due(lineage, [shard]) == []
        write_states(lineage, lineage.recipe.shards[number + 1 :][:1])  # another wave could be trained on
        assert train_draft(lineage, nullcontext(), [shard]) == record
        assert len(waves.records(lineage.draft_checkpoint().folder)) == number + 1
    assert waves.due(lineage, [first]) == [first]  # the second pass has begun


def test_a_run_of_a_later_wave_trains_no_other_one(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = _waves(tmp_path, tiny_llama)
    first, second = lineage.recipe.shards[:2]
    write_states(lineage, [first, second])
    with pytest.raises(RecipeError, match=f"{second} cannot be trained on yet: wave 1 of 3 comes first"):
        train_draft(lineage, nullcontext(), [second])
    assert not waves.records(lineage.draft_checkpoint().folder)


def test_another_setting_amid_the_waves_is_another_training_from_the_first_wave_on(
    tmp_path: Path, tiny_llama: Path
) -> None:
    lineage = _waves(tmp_path, tiny_llama)
    first = lineage.recipe.shards[0]
    write_states(lineage, [first])
    record = train_draft(lineage, nullcontext())
    training_ = lineage.recipe.training.model_copy(update={"learning_rate": 1e-4})
    changed = Lineage(lineage.recipe.model_copy(update={"training": training_}), lineage.storage_root)
    turn = waves.next_turn(changed)
    assert turn is not None
    assert turn.number == 0
    assert waves.due(changed, [first]) == [first]
    go_through(changed)
    assert changed.draft_checkpoint().manifest() is not None
    assert left_over(changed) == []
    assert waves.records(lineage.draft_checkpoint().folder) == [record]  # the one before could go on


_OTHERS = {"rates": Rates(head=0.5), "optimizer": "muon", "loss": "ce"}


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return type(value)(value / 2 if value else 1) if isinstance(value, int | float) else 7


@pytest.mark.parametrize("planned", [1, 3])
def test_checkpoints_of_one_fingerprint_are_of_one_value_of_each_setting(
    tmp_path: Path, tiny_llama: Path, planned: int
) -> None:
    lineage = make_lineage(tmp_path, tiny_llama, waves=planned)
    plan_waves(lineage)
    if planned == 1:
        write_states(lineage, list(lineage.recipe.shards))
    place = lineage.draft_checkpoint()
    for name in set(Training.model_fields) - {"draft_layers", "sweep"}:  # of the latter: see test_sweep
        value = getattr(lineage.recipe.training, name)
        settings = lineage.recipe.training.model_copy(update={name: _OTHERS.get(name, _another(value))})
        changed = Lineage(lineage.recipe.model_copy(update={"training": settings}), lineage.storage_root)
        is_same = changed.draft_checkpoint().fingerprint == place.fingerprint
        assert is_same == (name == "checkpoint_every_s"), name


def test_a_disk_that_cannot_take_the_judges_is_known_before_they_are_copied(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = _waves(tmp_path, tiny_llama, storage={"keep_free_gib": 3.0})
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
    lineage = _waves(tmp_path, tiny_llama)
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
    lineage = _waves(tmp_path, tiny_llama)
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
    lineage = _waves(tmp_path, tiny_llama)
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
    whole = _waves(tmp_path / "whole", tiny_llama, **changes)
    assert _life(whole, 1 << 30) == 0
    killed = _waves(tmp_path / "killed", tiny_llama, **changes)
    chance = random.Random(0)
    kills = _live_until_done(killed, [chance.randrange(10, 90) for _ in range(200)])
    assert kills >= 5
    assert _draft(killed) == _draft(whole)
    assert _metrics(killed) == _metrics(whole)
    assert left_over(killed) == left_over(whole) == []
