"""The step in its own process: news, failures, interruption, and the whole of it on a tiny target."""

import json
import logging
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from eagle3_pipeline.errors import BadInput, Eagle3Error
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.training import child
from eagle3_pipeline.training.child import loss_curve, run_process
from eagle3_pipeline.training.curves import validation_curve
from eagle3_pipeline.training.events import describe, parse
from eagle3_pipeline.training.training import train_draft
from tests.training.tiny import plan
from tests.training.world import in_this_process, make_lineage, write_states

_PYTHON = sys.executable
_START = {
    "event": "start", "step": 0, "steps": 20, "epochs": 2, "parameters": 7, "samples": 5, "rows": 90,
    "held_out": 1, "judged": 0, "without_supervision": 0, "device": "cpu",
}  # fmt: skip
_STEP = {
    "event": "step", "step": 10, "steps": 20, "epoch": 0, "epochs": 2, "loss": 3.5,
    "accuracy": [0.5, 0.25], "tokens_per_second": 1234.5, "seconds_left": 61,
}  # fmt: skip
_DONE = {"event": "done", "steps": 20, "loss": 1.0}


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a script in the place of the Python that trains."""

    def install(body: str) -> None:
        script = tmp_path / "python"
        script.write_text(f"#!{_PYTHON}\nimport json, os, sys, time\n{body}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(child.sys, "executable", str(script))

    return install


def _say(*events: dict[str, object]) -> str:
    return "".join(f"print(json.dumps({event!r}), flush=True)\n" for event in events)


def test_events_become_lines_a_person_can_read_and_facts(
    tmp_path: Path, trainer: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "eagle3_pipeline")
    trainer(_say(_START, _STEP) + "print('a library says hello')\n" + _say(_DONE))
    assert run_process(plan(tmp_path)) == {"steps": 20, "loss": 1.0}
    assert (
        "step 10/20, epoch 1/2: loss 3.500, accuracy 50.0 / 25.0 %, 1,234 tokens/s, 61 s left" in caplog.text
    )
    assert "a library says hello" in (tmp_path / "training.log").read_text()


def test_a_named_failure_is_raised_as_what_it_is(tmp_path: Path, trainer: Callable[[str], None]) -> None:
    trainer(_say({"event": "failed", "error": "BadInput", "message": "no such draft"}) + "sys.exit(1)")
    with pytest.raises(BadInput, match="no such draft"):
        run_process(plan(tmp_path))


def test_a_process_that_dies_shows_the_end_of_its_log(tmp_path: Path, trainer: Callable[[str], None]) -> None:
    trainer("print('CUDA out of memory', file=sys.stderr)\nos._exit(9)")
    with pytest.raises(
        Eagle3Error, match=r"(?s)ended without a draft.*CUDA out of memory.*its last checkpoint"
    ):
        run_process(plan(tmp_path))


def test_an_interruption_ends_the_process(
    tmp_path: Path, trainer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(_say(_START, {**_STEP, "pid": 0}).replace("'pid': 0", "'pid': os.getpid()") + "time.sleep(60)")
    pids: list[int] = []

    def interrupted(event: dict[str, int]) -> None:
        if event["event"] == "step":
            pids.append(event["pid"])
            raise KeyboardInterrupt

    monkeypatch.setattr(child, "describe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_process(plan(tmp_path))
    assert not psutil.pid_exists(pids[0])


def test_the_process_ends_when_its_parent_is_killed() -> None:
    body = (
        "from eagle3_pipeline.training.parent import end_with_parent\n"
        "import time\nend_with_parent()\ntime.sleep(60)"
    )
    process = subprocess.Popen([_PYTHON, "-c", body], stdin=subprocess.PIPE)
    assert process.poll() is None
    assert process.stdin is not None
    process.stdin.close()  # what the kernel does for a parent that is gone
    assert process.wait(30) == 1


def test_a_base_draft_that_is_judged_again_is_in_the_curve_once(
    tmp_path: Path, trainer: Callable[[str], None]
) -> None:
    judged = {"step": 0, "loss": 5.0, "acceptance_length": 1.25, "accuracy_by_position": [0.25]}
    start_judged = {"event": "start_judged", "epoch": -1, "chance": 0.03, **judged}
    epoch = {"event": "epoch", "epoch": 0, "epochs": 1, "is_best": True, **judged, "step": 20}
    trainer(_say(_START, start_judged, _STEP) + "os._exit(9)")
    with pytest.raises(Eagle3Error, match="without a draft"):
        run_process(plan(tmp_path))
    trainer(_say(_START, start_judged, _STEP, epoch, _DONE))
    heard: list[dict[str, object]] = []
    run_process(plan(tmp_path), heard.append)
    assert [event["event"] for event in heard] == ["start", "start_judged", "step", "epoch"]
    said = describe(heard[1]) or ""
    assert "acceptance length 1.250, accuracy 25.0 %; always the most frequent token would be" in said
    assert validation_curve(tmp_path / "metrics.jsonl") == {
        "steps": [0, 20],
        "epochs": [0, 1],
        "acceptance_length": [1.25, 1.25],
    }


def test_metrics_after_the_checkpoint_of_a_resume_are_forgotten(
    tmp_path: Path, trainer: Callable[[str], None]
) -> None:
    steps = [{**_STEP, "step": step} for step in (4, 8, 12)]
    trainer(_say(_START, *steps) + "os._exit(9)")
    with pytest.raises(Eagle3Error, match="without a draft"):
        run_process(plan(tmp_path))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')  # torn
    trainer(_say({**_START, "step": 8}, {**_STEP, "step": 16}, _DONE))
    run_process(plan(tmp_path))
    assert loss_curve(tmp_path / "metrics.jsonl")["steps"] == [4, 8, 16]


def test_a_loss_curve_is_thinned_out_and_ends_with_the_last_step(tmp_path: Path) -> None:
    lines = [json.dumps({**_STEP, "step": step}) + "\n" for step in range(1, 1002)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    steps = loss_curve(tmp_path / "metrics.jsonl")["steps"]
    assert len(steps) <= 100
    assert steps[-1] == 1001


def test_samples_without_states_are_counted_and_the_others_train(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    lineage = make_lineage(tmp_path, tiny_llama, training={"epochs": 1})
    first, *others = lineage.recipe.shards
    write_states(lineage, [first], leave_out=frozenset(f"{first}-{n}-t0" for n in (3, 5, 6)))
    write_states(lineage, others)
    heard: list[str] = []
    made = train_draft(lineage, nullcontext(), on_event=lambda event: heard.append(event["event"]))
    assert isinstance(made, Manifest)
    assert made.facts["without_states"] == 3
    assert made.facts["samples"] + made.facts["judges"] == 24 - 3
    assert made.facts["judges"] == 2
    assert 0 <= made.facts["greedy_agreement"] < 0.5  # of random states
    assert made.facts["validation_curve"]["epochs"] == [1]
    assert made.facts["validation_curve"]["steps"] == [made.facts["steps"]]
    assert heard == ["start", "step", "epoch", "done"]


def test_text_of_libraries_is_no_event_and_silent_events_have_no_line() -> None:
    assert parse("loading weights {") is None
    assert parse('{"event": torn') is None
    assert describe({"event": "done"}) is None
