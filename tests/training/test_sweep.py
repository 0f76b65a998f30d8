"""Alternatives: each trained once, wherever it is killed; the best goes on; and what a failed one costs."""

import json
import math
import os
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.alternatives import alternatives, chosen
from eagle3_pipeline.errors import (
    DamagedFile,
    Eagle3Error,
    MissingInput,
    NotEnoughRoom,
    QualityError,
    RecipeError,
)
from eagle3_pipeline.forecast import _epochs_left, forecast
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.release.expected import Expected
from eagle3_pipeline.samples.checkpoint_bytes import checkpoint_bytes
from eagle3_pipeline.samples.leftovers import leftovers
from eagle3_pipeline.training import meter, training
from eagle3_pipeline.training.events import error_of
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.training.training import train_draft
from eagle3_pipeline.waves import turns
from tests.training.world import in_this_process, make_lineage, plan_waves, write_states

_SWEEP: dict[str, dict[str, Any]] = {
    "low": {"learning_rate": 1e-4},
    "mid": {},
    "high": {"learning_rate": 0.5},
}


class Trainer:
    """In the place of the training process: a draft whose acceptance follows from its learning rate."""

    def __init__(self, lengths: dict[float, float]) -> None:
        self.lengths = lengths
        self.trained: list[float] = []
        self.errors: dict[float, Eagle3Error] = {}

    def __call__(self, plan: TrainingPlan, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        rate, folder = plan.learning_rate, Path(plan.folder)
        self.trained.append(rate)
        if error := self.errors.get(rate):
            raise error
        (folder / "checkpoints" / "step-1").mkdir(parents=True, exist_ok=True)
        if (length := self.lengths[rate]) == 0:
            raise QualityError("loss nan at step 7")
        (folder / "draft").mkdir(exist_ok=True)
        (folder / "draft" / "model.safetensors").write_text(f"trained with {rate}")
        step = {"event": "step", "step": 9, "steps": 9, "loss": 3.0, "accuracy": [0.4]}
        epoch = {"event": "epoch", "step": 9, "epoch": 0, "loss": 2.0, "acceptance_length": length}
        (folder / "metrics.jsonl").write_text(f"{json.dumps(step)}\n{json.dumps(epoch)}\n")
        for event in (step, epoch):
            on_event(event)
        facts = {"steps": 9, "loss": 2.0, "seconds": 4.5, "tokens": 90, "held_out": 3, "judges": 3}
        return {**facts, "simulated_acceptance_length": length}


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    made = Trainer({1e-4: 1.2, 1e-3: 1.4, 0.5: 1.1, 0.25: 1.4})
    monkeypatch.setattr(training, "run_process", made)
    return made


def _lineage(tmp_path: Path, tiny_llama: Path, sweep: dict[str, Any] = _SWEEP, **changes: Any) -> Lineage:
    changes["training"] = {"sweep": sweep, **changes.get("training", {})}
    lineage = make_lineage(tmp_path, tiny_llama, **changes)
    write_states(lineage, list(lineage.recipe.shards))
    return lineage


def _other(lineage: Lineage, **settings: Any) -> Lineage:
    """The same run with other settings of the training."""
    values = lineage.recipe.training.model_dump() | settings
    changed = type(lineage.recipe.training).model_validate(values)
    return replace(lineage, recipe=lineage.recipe.model_copy(update={"training": changed}))


def _train(lineage: Lineage) -> Manifest:
    made = train_draft(lineage, nullcontext())
    assert isinstance(made, Manifest)
    return made


def test_the_best_of_the_alternatives_goes_on_and_the_table_has_all_of_them(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer
) -> None:
    lineage = _lineage(tmp_path, tiny_llama)
    made = _train(lineage)
    assert trainer.trained == [1e-4, 1e-3, 0.5]
    assert made.facts["alternative"] == "mid"
    best = alternatives(lineage)["mid"].draft_checkpoint().require()
    assert made.files == best.files
    assert best.facts.items() <= made.facts.items()
    assert made.facts["judges"] == 3
    rows = made.facts["sweep"]
    assert [(one["alternative"], one["settings"], one["acceptance_length"]) for one in rows] == [
        ("low", {"learning_rate": 1e-4}, 1.2),
        ("mid", {}, 1.4),
        ("high", {"learning_rate": 0.5}, 1.1),
    ]
    for one in rows:
        assert (one["steps"], one["loss"], one["seconds"], one["failed"]) == (9, 2.0, 4.5, None)
        assert one["validation_curve"] == {
            "steps": [9],
            "epochs": [1],
            "acceptance_length": [one["acceptance_length"]],
        }
        assert (lineage.folder / "draft_checkpoint" / one["folder"] / "manifest.json").exists()
    lineage.draft_checkpoint().verify()
    assert chosen(lineage).recipe.training.learning_rate == 1e-3


def test_of_equal_alternatives_the_first_of_the_recipe_goes_on(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer
) -> None:
    sweep = {"z": {"learning_rate": 0.25}, "a": {"learning_rate": 1e-3}}
    assert _train(_lineage(tmp_path, tiny_llama, sweep)).facts["alternative"] == "z"


def test_a_finished_sweep_trains_nothing_and_asks_for_no_gpu(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer
) -> None:
    lineage = _lineage(tmp_path, tiny_llama)
    made = _train(lineage)
    trainer.trained.clear()

    class NoLease(nullcontext[None]):
        def __enter__(self) -> None:
            raise AssertionError("the GPU was asked for")

    assert train_draft(lineage, NoLease()) == made
    assert trainer.trained == []


def test_a_second_run_that_waited_for_the_gpu_compares_nothing_again(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer
) -> None:
    lineage = _lineage(tmp_path, tiny_llama)

    class Lease(nullcontext[None]):
        def __enter__(self) -> None:
            if lineage.draft_checkpoint().manifest() is None:
                _train(lineage)

    train_draft(lineage, Lease())
    assert len(trainer.trained) == 3


def test_only_the_alternatives_that_are_new_or_changed_are_trained(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer
) -> None:
    lineage = _lineage(tmp_path, tiny_llama)
    first = _train(lineage)
    trainer.trained.clear()
    more = _other(lineage, sweep={**_SWEEP, "low": {"learning_rate": 0.25}})
    assert more.draft_checkpoint() != lineage.draft_checkpoint()
    assert _train(more).facts["alternative"] == "low"
    assert trainer.trained == [0.25]
    assert _train(_other(lineage, sweep={"mid": {}, "low": {"learning_rate": 1e-4}})).files == first.files
    assert trainer.trained == [0.25]


def test_an_alternative_is_the_training_of_a_recipe_with_its_settings(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer
) -> None:
    lineage = _lineage(tmp_path, tiny_llama)
    alone = _other(lineage, sweep={})
    before = _train(alone)
    assert "sweep" not in before.facts
    made = _train(lineage)
    assert trainer.trained == [1e-3, 1e-4, 0.5]
    assert made.files == before.files
    written_down = _other(lineage, sweep={}, learning_rate=0.5)
    assert written_down.draft_checkpoint().manifest() is not None


def test_an_alternative_whose_loss_is_no_number_does_not_end_the_others(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer
) -> None:
    trainer.lengths[1e-4] = 0
    lineage = _lineage(tmp_path, tiny_llama)
    made = _train(lineage)
    row = made.facts["sweep"][0]
    assert (row["alternative"], row["acceptance_length"], row["loss"]) == ("low", None, None)
    assert row["failed"] == "loss nan at step 7"
    assert not list((lineage.folder / "draft_checkpoint").glob("*/checkpoints"))


def test_an_alternative_that_does_not_fit_into_memory_does_not_end_the_others_but_a_full_disk_does(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer
) -> None:
    lineage = _lineage(tmp_path, tiny_llama)
    trainer.errors[1e-3] = NotEnoughRoom("the disk is full")
    with pytest.raises(NotEnoughRoom, match="the disk is full"):
        _train(lineage)
    assert trainer.trained == [1e-4, 1e-3]
    trainer.errors[1e-3] = error_of({"error": "NotEnoughMemory", "message": "a step holds 9 GiB"})
    made = _train(lineage)
    assert trainer.trained == [1e-4, 1e-3, 1e-3, 0.5]
    assert [one["failed"] for one in made.facts["sweep"]] == [None, "a step holds 9 GiB", None]
    assert made.facts["alternative"] == "low"


def test_where_all_alternatives_fail_each_says_why(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer
) -> None:
    trainer.lengths = dict.fromkeys(trainer.lengths, 0.0)
    lineage = _lineage(tmp_path, tiny_llama)
    with pytest.raises(QualityError, match=r"(?s)all 3 alternatives .*low: loss nan.*high: loss nan"):
        train_draft(lineage, nullcontext())
    assert lineage.draft_checkpoint().manifest() is None


def test_a_draft_that_was_damaged_since_it_was_trained_does_not_go_on(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer
) -> None:
    lineage = _lineage(tmp_path, tiny_llama)
    folder = alternatives(lineage)["mid"].draft_checkpoint().folder
    _train(_other(lineage, sweep={}))
    (folder / "draft" / "model.safetensors").write_text("cut")
    with pytest.raises(DamagedFile, match=f"{folder}.* 3 bytes, expected .*Delete .*manifest.json"):
        train_draft(lineage, nullcontext())
    (folder / "manifest.json").unlink()
    assert _train(lineage).facts["alternative"] == "mid"


def test_events_carry_the_name_of_their_alternative_and_each_ends_with_a_line(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "eagle3_pipeline")
    trainer.lengths[0.5] = 0
    heard: list[dict[str, Any]] = []
    train_draft(_lineage(tmp_path, tiny_llama), nullcontext(), on_event=heard.append)
    assert [(event["event"], event["alternative"]) for event in heard] == [
        *((kind, "low") for kind in ("step", "epoch", "alternative")),
        *((kind, "mid") for kind in ("step", "epoch", "alternative")),
        ("alternative", "high"),
    ]
    assert "alternative low (1 of 3): acceptance length 1.200, loss 2.000, 9 steps in 4 s" in caplog.text
    assert "alternative high (3 of 3) failed: loss nan at step 7" in caplog.text


def test_another_size_of_vocabulary_is_made_for_the_alternative_that_asks_for_it(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = {"small": {"learning_rate": 0.25, "draft_tokens": 128}, "low": {"learning_rate": 1e-4}}
    lineage = _lineage(tmp_path, tiny_llama, sweep)
    plans: list[str] = []

    def watched(plan: TrainingPlan, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        plans.append(plan.vocabulary)
        return trainer(plan, on_event)

    monkeypatch.setattr(training, "run_process", watched)
    assert _train(lineage).facts["alternative"] == "small"
    small, own = chosen(lineage).vocabulary_map(), lineage.vocabulary_map()
    assert [Path(one).parent for one in plans] == [small.folder, own.folder]
    assert (small.require().facts["draft_tokens"], own.require().facts["draft_tokens"]) == (128, 256)
    assert Expected.of(lineage).draft_tokens == 128


def test_a_vocabulary_is_of_one_size_one_target_and_one_set_of_samples(
    tmp_path: Path, tiny_llama: Path
) -> None:
    lineage = make_lineage(tmp_path, tiny_llama)
    own = lineage.vocabulary_map()
    vocabulary = lineage.recipe.vocabulary.model_copy(update={"draft_tokens": 255})
    run = lineage.recipe.run.model_copy(update={"shards": 2})
    for changes in ({"vocabulary": vocabulary}, {"run": run}):
        other = replace(lineage, recipe=lineage.recipe.model_copy(update=changes))
        write_states(other, list(other.recipe.shards))
        assert other.vocabulary_map().fingerprint != own.fingerprint
        with pytest.raises(MissingInput, match="vocabulary_map is not made yet"):
            train_draft(other, nullcontext())


def test_alternatives_are_never_trained_in_waves(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = make_lineage(tmp_path, tiny_llama, waves="auto", training={"sweep": _SWEEP})
    plan_waves(lineage)  # by an audit that was made before there were alternatives
    with pytest.raises(RecipeError, match=r"compares 3 trainings .* in 3 waves.*remove training.sweep"):
        turns(lineage)
    at_once = make_lineage(tmp_path / "once", tiny_llama, waves="auto", training={"sweep": _SWEEP})
    plan_waves(at_once, list(at_once.recipe.shards))
    assert len(turns(at_once)) == 1


def test_a_training_that_may_end_early_is_never_made_in_waves(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = make_lineage(tmp_path, tiny_llama, waves="auto", training={"patience": 1})
    plan_waves(lineage)
    with pytest.raises(RecipeError, match=r"patience is 1, .* in 3 waves.*remove training.patience"):
        turns(lineage)


def test_a_forecast_complains_of_alternatives_that_came_after_the_waves_were_decided(
    tmp_path: Path, tiny_llama: Path
) -> None:
    lineage = make_lineage(tmp_path, tiny_llama, waves="auto")
    plan_waves(lineage)
    assert forecast(lineage).complaint is None
    found = forecast(_other(lineage, sweep=_SWEEP))
    assert found.is_decided
    assert len(found.waves) == 3
    assert re.search(r"compares 3 trainings .* in 3 waves", str(found.complaint))


def test_what_the_alternatives_still_take_is_known_and_their_checkpoints_are_no_leftovers(
    tmp_path: Path, tiny_llama: Path, trainer: Trainer
) -> None:
    lineage = _lineage(tmp_path, tiny_llama)
    alone = _other(lineage, sweep={})
    assert _epochs_left(lineage) == 3 * _epochs_left(alone)
    nothing_yet = checkpoint_bytes(lineage)
    assert nothing_yet > checkpoint_bytes(alone)
    checkpoints = alternatives(lineage)["high"].draft_checkpoint().folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "weights").write_bytes(b"0" * (1 << 21))
    assert checkpoint_bytes(lineage) == nothing_yet - (1 << 21)
    assert leftovers(lineage) == []
    assert [one.folder for one in leftovers(alone)] == [checkpoints]
    _train(alone)
    assert _epochs_left(lineage) == 2 * _epochs_left(alone)
    _train(lineage)
    assert checkpoint_bytes(lineage) == 0


def _die_at(number: int) -> None:
    """End this process, as kill -9 would, before the `number`-th operation that changes the disk."""
    left = number

    def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            return operation(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "rename", "unlink", "mkdir", "link"):
        setattr(os, name, dying(getattr(os, name)))


def _life(lineage: Lineage, operations: int) -> int:
    """Train in a process of its own that dies after so many operations; its exit status."""
    if not (pid := os.fork()):
        status = 1
        try:
            _die_at(operations)
            _train(lineage)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_kills_anywhere_end_with_the_same_table_and_the_same_weights(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.setattr(meter, "_REPORT_EVERY_S", math.inf)
    settings = {"tokens_per_step": 256, "epochs": 1}
    sweep = {"low": {"learning_rate": 1e-4}, "high": {"learning_rate": 5e-3}}
    whole = _lineage(tmp_path / "whole", tiny_llama, sweep, training=settings)
    assert _life(whole, 1 << 30) == 0
    killed = _lineage(tmp_path / "killed", tiny_llama, sweep, training=settings)
    chance, kills = random.Random(0), 0
    while (status := _life(killed, chance.randrange(8, 45))) == 9:
        kills += 1
        assert kills < 100
    assert status == 0
    assert kills >= 3
    tables = []
    for lineage in (whole, killed):
        made = lineage.draft_checkpoint().verify()
        assert not list((lineage.folder / "draft_checkpoint").glob("*/checkpoints"))
        tables.append([{**one, "seconds": 0} for one in made.facts["sweep"]])
    assert tables[0] == tables[1]
    weights = [one.draft_checkpoint().folder / "draft" / "model.safetensors" for one in (whole, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
