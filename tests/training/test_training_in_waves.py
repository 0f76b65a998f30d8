"""Training wave by wave: what each turn trains on, what it deletes, and what it refuses."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_pipeline import waves
from eagle3_pipeline.errors import MissingInput, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.recipe.training import Rates, Training
from eagle3_pipeline.samples.sample import prompt_id_of
from eagle3_pipeline.shards.consumption import consumption
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.training import process
from eagle3_pipeline.training.batches import Split
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
    three_waves,
    write_states,
)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)


def test_each_call_trains_one_wave_and_deletes_its_states_and_the_last_one_makes_the_draft(
    tmp_path: Path, tiny_llama: Path
) -> None:
    lineage = three_waves(tmp_path, tiny_llama)
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
    lineage = three_waves(tmp_path, tiny_llama, passes=2, training={"tokens_per_step": 64, "epochs": 4})
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
    lineage = three_waves(tmp_path, tiny_llama)
    rates = _record_rates(monkeypatch)
    shard = lineage.recipe.shards[0]
    write_states(lineage, [shard], leave_out=frozenset(f"{shard}-{n}-t0" for n in (1, 2, 3, 5, 6)))
    record = train_draft(lineage, nullcontext())
    assert isinstance(record, waves.TurnRecord)
    plan = json.loads((lineage.draft_checkpoint().folder / "samples.json").read_text())
    assert plan["sizes"] == [8, 8, 8]
    go_through(lineage)
    facts, steps = lineage.draft_checkpoint().require().facts, len(rates)
    whole = three_waves(tmp_path / "whole", tiny_llama)
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
    lineage = three_waves(tmp_path, tiny_llama, passes=2)
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
    lineage = three_waves(tmp_path, tiny_llama)
    shard = lineage.recipe.shards[0]
    write_states(lineage, [shard])
    reader = ShardReader([lineage.hidden_state_shards(shard).folder])
    before = {name: reader[at]["hidden_states"].clone() for at, name in enumerate(reader.sample_ids)}
    train_draft(lineage, nullcontext())
    kept = ShardReader([lineage.draft_checkpoint().folder / "validation"])
    assert len(kept) == 2
    assert all(before[name].equal(kept[at]["hidden_states"]) for at, name in enumerate(kept.sample_ids))


def test_a_turn_without_its_states_is_refused_by_name(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = three_waves(tmp_path, tiny_llama)
    with pytest.raises(MissingInput, match="hidden_state_shards p8-s000 is not made yet"):
        train_draft(lineage, nullcontext())


def test_a_second_run_that_waited_for_the_gpu_trains_nothing_again(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = three_waves(tmp_path, tiny_llama)
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
    lineage = three_waves(tmp_path, tiny_llama, passes=2)
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
    lineage = three_waves(tmp_path, tiny_llama)
    first, second = lineage.recipe.shards[:2]
    write_states(lineage, [first, second])
    with pytest.raises(RecipeError, match=f"{second} cannot be trained on yet: wave 1 of 3 comes first"):
        train_draft(lineage, nullcontext(), [second])
    assert not waves.records(lineage.draft_checkpoint().folder)


def test_another_setting_amid_the_waves_is_another_training_from_the_first_wave_on(
    tmp_path: Path, tiny_llama: Path
) -> None:
    lineage = three_waves(tmp_path, tiny_llama)
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
