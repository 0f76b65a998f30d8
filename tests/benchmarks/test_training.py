import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import memory, ours, quality, throughput
from benchmarks.training.plain import train as train_plain
from benchmarks.training.their_data import draft_tokens
from benchmarks.training.theirs import (
    CHECKPOINT,
    CPU_OPTIONS,
    Clock,
    epochs_for,
    train,
    workload_options,
)
from benchmarks.training.workload import for_timing, plan_of
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.training import process
from eagle3_pipeline.training.plan import TrainingPlan
from tests.benchmarks.conftest import TINY
from tests.training.world import make_lineage, plan_waves, write_states


def test_speculators_reads_the_samples_that_the_shards_hold(plan: TrainingPlan, data: Path) -> None:
    from speculators.train.data import ArrowDataset

    theirs = ArrowDataset(max_len=128, datapath=data, on_missing="raise")
    ours_ = ShardReader([Path(shard) for shard in plan.shards])
    assert len(theirs) == len(ours_) == 20
    for number in (0, 19):
        mine, read = ours_[number], theirs[number]
        assert torch.equal(read["input_ids"], mine["token_ids"])
        assert torch.equal(read["loss_mask"].bool(), mine["loss_mask"])
        assert torch.equal(read["hidden_states"], mine["hidden_states"][:, :-1].flatten(1))
        assert torch.equal(read["verifier_last_hidden_states"], mine["hidden_states"][:, -1])
    assert draft_tokens(data) == TINY.draft_tokens


def _events(*steps: tuple[float, float]) -> list[ours.Heard]:
    """Step events: when each came, and tokens a second since the one before."""
    told = [(when, {"event": "step", "tokens_per_second": rate, "waited_s": 0.1}) for when, rate in steps]
    return [(0.0, {"event": "start"}), *told, (99.0, {"event": "epoch"})]


def test_the_rate_is_of_the_time_between_step_events_and_the_first_ones_warm_up() -> None:
    found = ours.rate(_events((10.0, 1.0), (15.0, 1000.0), (25.0, 400.0)))
    assert found["tokens"] == 9000
    assert found["seconds"] == 15
    assert found["tokens_per_second"] == 600
    assert found["waited_share"] == pytest.approx(0.2 / 15, abs=1e-4)
    with pytest.raises(RuntimeError, match="1 step events, expected at least 2"):
        ours.rate(_events((10.0, 1.0)))


class Scripted:
    """Loops with a speed each; every round is slower than the one before."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ours(self) -> dict[str, float]:
        return self._run("ours", 1500.0)

    def plain(self) -> dict[str, float]:
        return self._run("plain", 1000.0)

    def _run(self, who: str, speed: float) -> dict[str, float]:
        self.asked.append(who)
        return {"tokens_per_second": speed / self.asked.count(who)}


def test_both_loops_take_turns_in_both_orders_after_a_round_that_warms_up() -> None:
    contest = Scripted()
    found = throughput.hold(contest, rounds=2)
    assert contest.asked == ["ours", "plain", "ours", "plain", "plain", "ours"]
    assert found["tokens_per_second"]["ratio"] == {"median": 1.5, "least": 1.5, "most": 1.5}
    assert found["tokens_per_second"]["ours"] == {"median": 625, "least": 500, "most": 750}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_the_plain_loop_trains_the_same_parameters_with_speculators_parts(
    plan: TrainingPlan, data: Path
) -> None:
    found = train_plain(plan, data, steps=5, workers=0)
    assert found["tokens"] == (4 + 3) * 31  # of the last two steps: the others warm up
    assert found["loss"] > 0


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_speculators_trains_on_a_machine_without_an_accelerator(
    plan: TrainingPlan, data: Path, tmp_path: Path
) -> None:
    options = [*workload_options(plan, data, tmp_path, steps=7), *CPU_OPTIONS, "--num-workers", "0"]
    found = train(options)
    assert found["steps"] == 7  # an epoch of five steps and a part of one; the first step warms up
    assert found["tokens"] == (4 + 4 + 4 + 2 + 4 + 4) * 31
    draft = tmp_path / "checkpoints" / CHECKPOINT
    config = json.loads((draft / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == list(plan.layers[:-1])
    assert config["draft_vocab_size"] == TINY.draft_tokens


def test_speculators_has_its_defaults_in_all_that_no_comparison_needs(plan: TrainingPlan, data: Path) -> None:
    from speculators.train.config import TrainConfig

    given = [*workload_options(plan, data, Path("out"), steps=7), *CPU_OPTIONS]
    config, default = TrainConfig.resolve(given), TrainConfig()
    of_one, of_other = config.flatten(), default.flatten()
    assert {name for name, value in of_one.items() if value != of_other.get(name)} == {
        *("verifier_name_or_path", "target_layer_ids", "data_path", "on_missing", "mask_token_id"),
        *("draft_vocab_size", "total_seq_len", "max_steps", "seed", "save_path", "log_dir"),
        *("draft_attn_impl", "loss_implementation", "num_workers"),
    }
    assert (config.optimizer.optimizer, config.optimizer.lr, config.draft.norm_output) == ("muon", 1e-3, True)


def test_a_last_epoch_ends_with_the_steps_that_are_wanted() -> None:
    class Sampler:
        def set_epoch(self, epoch: int) -> None:
            self.batches = (4, 3, 4)[epoch]

        def __len__(self) -> int:
            return self.batches

    assert [epochs_for(steps, Sampler()) for steps in (1, 4, 5, 7, 8)] == [1, 1, 2, 2, 3]


def test_the_clock_stands_still_for_what_is_no_step_and_counts_no_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock()

    def step(seconds: float, tokens: int) -> None:
        clock.count(torch.tensor([0] * tokens + [-1] * 3))
        now[0] += seconds
        clock.stepped()

    step(100.0, 5)  # warms up
    step(2.0, 10)
    clock.stop()
    now[0] += 50.0  # validation
    clock.start()
    step(3.0, 20)
    step(3.0, 10)
    clock.stop()
    assert clock.numbers() == {
        "steps": 4,
        "tokens": 40,
        "seconds": 8.0,
        "tokens_per_second": 5.0,
        "seconds_per_step": 2.6667,
    }


def _line(variant: str, seed: int, accepted: int, **training: float) -> dict[str, Any]:
    counts = {"drafts": 100, "draft_tokens": 300, "accepted_tokens": accepted}
    counts["accepted_per_position"] = [accepted, 0, 0]  # type: ignore[assignment]
    return {
        "variant": variant,
        "seed": seed,
        "accepted_per_draft": accepted / 100,
        "by_set": {"alpaca": counts, "gsm8k": {**counts, "drafts": 200}},
        "training": training,
    }


def test_speculators_gets_the_steps_of_ours_or_as_many_as_it_does_in_its_time() -> None:
    lines = [
        _line("ours", 0, 40, steps=144, seconds=210.0),
        _line("same_steps", 0, 30, steps=144, seconds_per_step=2.0),
    ]
    assert quality.steps_of("same_steps", lines) == 144
    assert quality.steps_of("same_time", lines) == 105


def test_drafts_are_compared_by_accepted_tokens_seed_by_seed_and_set_by_set() -> None:
    accepted = {"ours": (40, 48), "frozen_head": (38, 40), "same_steps": (30, 40), "same_time": (20, 32)}
    lines = [_line(name, seed, of) for name, both in accepted.items() for seed, of in enumerate(both)]
    found = quality.conclude(lines)
    assert found["ours_to_same_steps"]["ratio_of_accepted"] == {"median": 1.267, "least": 1.2, "most": 1.333}
    assert found["ours_to_same_time"]["ratio_of_accepted"]["least"] == 1.5
    assert found["ours_to_frozen_head"]["ratio_of_mean_accepted"] == pytest.approx(0.44 / 0.39, abs=1e-4)
    assert found["accepted_per_draft_by_set"]["ours"] == {"alpaca": 0.44, "gsm8k": 0.22}


def test_memory_is_the_most_of_the_times_that_end_with_an_event_of_each_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "anonymous_bytes", lambda: 100)
    watch = memory.Watch()
    for kind, most in (("start", 10), ("step", 50), ("step", 40), ("done", 30)):
        watch.saw(100 + most)
        watch.saw(101)
        watch.note(kind)
    assert watch.by_event == {"start": 10, "step": 50, "done": 30}


def test_the_memory_of_a_training_is_measured_beside_what_is_computed_for_it(
    plan: TrainingPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: {0})
    found = memory.watch_training(replace(plan, folder=str(tmp_path / "training"), epochs=1))
    assert found["peak"] == max(found["by_event"].values())
    assert {"start", "step", "epoch", "done"} <= set(found["by_event"])
    assert 0 < found["computed"] < sum(found["parts"].values())


def test_states_that_are_made_are_planned_on_without_a_server(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = make_lineage(tmp_path, tiny_llama)
    plan_waves(lineage)  # the audit
    write_states(lineage, list(lineage.recipe.shards))
    plan = plan_of(lineage)
    assert plan.shards == tuple(
        str(lineage.hidden_state_shards(shard).folder) for shard in lineage.recipe.shards
    )
    timed = for_timing(plan, tmp_path / "timed", train_head=False)
    assert (timed.folder, timed.epochs, timed.train_head) == (str(tmp_path / "timed"), 1, False)
