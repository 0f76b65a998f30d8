"""What their parent sees and records of training processes: ends, judgements, several under torchrun."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.training import child
from eagle3_pipeline.training.child import run_process
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.training.training import make_plan
from eagle3_pipeline.waves import next_turn
from tests.training.tiny import plan
from tests.training.world import make_lineage, write_states


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ("kill -9 $$", r"a draft: it was killed by signal 9 \(out of memory\?\)"),
        ("kill -11 $$", r"a draft: it was killed by signal 11 \(Segmentation fault\)"),
        ("exit 3", "a draft: it exited with 3"),
    ],
)
def test_how_a_process_ended_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, end: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(script))
    with pytest.raises(Eagle3Error, match=end):
        run_process(plan(tmp_path))
    with pytest.raises(Eagle3Error, match=end.replace("a draft", "a draft of turn 4")):
        run_process(plan(tmp_path, samples="samples.json", turn=4))


def _recorded(path: Path, *told: tuple[str, int] | tuple[str, int, int]) -> list[tuple[str, int]]:
    """Record events of these steps, a start with how many judgements it has; returns what is in the file."""
    for event, step, *judged in told:
        values: dict[str, Any] = {"event": event, "step": step, **({"judged": judged[0]} if judged else {})}
        child._record(path, values)
    found = map(json.loads, path.read_text().splitlines())
    return [(event["event"], event["step"]) for event in found]


def test_a_judgement_of_the_checkpoints_own_step_that_came_after_it_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = _recorded(path, ("start", 0, 0), ("step", 8), ("epoch", 8), ("step", 16))
    assert first == [("step", 8), ("epoch", 8), ("step", 16)]
    _recorded(path, ("start", 16, 1), ("epoch", 16))  # stopped at 16, then killed after the judgement
    assert _recorded(path, ("start", 16, 1), ("epoch", 16)) == [*first, ("epoch", 16)]


def test_the_judgement_of_a_base_draft_stays_where_its_first_epoch_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _recorded(path, ("start", 0, 0), ("start_judged", 0), ("step", 4))
    assert _recorded(path, ("start", 0, 1)) == [("start_judged", 0)]
    assert _recorded(path, ("start", 0, 0)) == []


@pytest.fixture
def pair(tmp_path: Path, tiny_llama: Path) -> TrainingPlan:
    """The plan of a training by two processes."""
    lineage = make_lineage(tmp_path, tiny_llama)
    write_states(lineage, list(lineage.recipe.shards))
    turn = next_turn(lineage)
    assert turn is not None
    return replace(make_plan(lineage, turn), processes=2, tokens_per_step=128)


def _interrupt(plan: TrainingPlan) -> list[psutil.Process]:
    """Start the training and interrupt it when it begins; returns the processes that it had."""
    together: list[psutil.Process] = []

    def interrupted(event: dict[str, object]) -> None:
        found = psutil.Process().children(recursive=True)
        # What tests before left has ended, and waits to be looked at.
        together.extend(one for one in found if one.status() != psutil.STATUS_ZOMBIE)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "describe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_process(plan)
    return together


@pytest.mark.real
def test_an_interruption_ends_all_processes_with_a_checkpoint(pair: TrainingPlan) -> None:
    together = _interrupt(pair)
    assert len(together) == 3  # torchrun and its two
    assert not any(one.is_running() for one in together)
    (checkpoint,) = (Path(pair.folder) / "checkpoints").glob("step-*")
    assert int(checkpoint.name[-8:]) > 0
    log = (Path(pair.folder) / "training.log").read_text()
    assert log.count("asked to end: training goes on at the checkpoint") == 2


@pytest.mark.real
def test_two_processes_that_were_interrupted_go_on_to_the_draft_of_two_that_were_not(
    pair: TrainingPlan, tmp_path: Path
) -> None:
    _interrupt(pair)
    facts = run_process(pair)
    assert facts["epochs"] == 2
    assert facts["steps"] > 0
    straight = replace(pair, folder=str(tmp_path / "straight"))
    Path(straight.folder).mkdir()
    run_process(straight)
    drafts = [Path(one.folder) / "draft" / "model.safetensors" for one in (pair, straight)]
    assert drafts[0].read_bytes() == drafts[1].read_bytes()
