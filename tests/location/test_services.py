"""The services as they are deployed: the real daemon, and a run that nobody watches."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import psutil
import pytest

from eagle3_pipeline.journal import read_journal
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from tests.fakes.faults import write_control
from tests.fakes.log import read_log
from tests.location.conftest import ROOT
from tests.recipes import distinct_prompts, tiny_recipe, write_prompts
from tests.serving.observe import wait_for

# The sensor of lost runs looks once a minute, and so does what launches them again.
PATIENCE_S = 400
# Each of six stages waits for the next tick of the automation, once a minute, and the prompts for five.
FLOW_S = 1200


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Dagster home with the dagster.yaml of this project; afterwards nothing that belongs to it runs."""
    folder = tmp_path / "home"
    folder.mkdir()
    shutil.copy(ROOT / "dagster.yaml", folder)
    monkeypatch.setenv("DAGSTER_HOME", str(folder))
    yield folder
    _kill_everything(folder)


_started: list["subprocess.Popen[bytes]"] = []


def _dagster(*arguments: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", *arguments, "-w", str(ROOT / "workspace.yaml")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _started.append(process)
    return process


def _kill_everything(home: Path) -> None:
    """As a power cut does: the daemon, the code server, the run, its step, the vLLM server, its watcher."""
    for _ in range(2):  # what was being started while the first round went by
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("DAGSTER_HOME") == str(home):
                    process.send_signal(signal.SIGKILL)
    while _started:
        _started.pop().wait(timeout=30)


def _wait_until_all_runs_are_over() -> None:
    with dg.DagsterInstance.get() as instance:
        wait_for(lambda: all(run.is_finished for run in instance.get_runs()), 60)


def test_after_a_kill_of_everything_the_services_alone_finish_the_run_and_lose_nothing(
    home: Path,
    tmp_path: Path,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    monkeypatch.setenv("EAGLE3_RECIPES", str(recipe))
    control = tmp_path / "control.json"
    monkeypatch.setenv("FAKE_CONTROL", str(control))
    write_control(control, seconds_per_token=0.05)
    lineage = Lineage(load_recipe(str(recipe), tmp_path), Path(os.environ["EAGLE3_STORAGE"]))

    def kept() -> int:
        journals = (lineage.folder / "synthetic_samples").glob("*/*/replies.jsonl")
        return sum(len(list(read_journal(one))) for one in journals)

    log = tmp_path / "requests.jsonl"
    monkeypatch.setenv("FAKE_REQUEST_LOG", str(log))

    def generated() -> int:
        """Requests for samples; what measures the draft asks for other lengths."""
        longest = lineage.recipe.generation.max_completion_tokens
        bodies = [one["body"] for one in read_log(log, "request")]
        return sum(one.get("max_completion_tokens") == longest for one in bodies)

    assert _dagster("dagster", "job", "launch", "-j", "tiny_pipeline").wait(timeout=120) == 0
    _dagster("dagster._daemon", "run")
    wait_for(lambda: kept() >= 3, PATIENCE_S)
    _kill_everything(home)
    sent, answered = generated(), kept()
    assert 3 <= answered < 24
    write_control(control)

    _dagster("dagster._daemon", "run")
    wait_for(lambda: lineage.released() is not None, PATIENCE_S)
    _wait_until_all_runs_are_over()
    with dg.DagsterInstance.get() as instance:
        again, first = instance.get_runs()
    assert (first.status, again.status) == (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS)
    assert again.parent_run_id == first.run_id
    assert generated() - sent == 24 - answered
    assert (
        sum(lineage.synthetic_samples(one).require().facts["samples"] for one in lineage.recipe.shards) == 24
    )


@pytest.mark.soak
def test_new_prompts_flow_to_a_new_release_by_themselves_once_the_sensors_are_switched_on(
    home: Path, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    monkeypatch.setenv("EAGLE3_RECIPES", str(recipe))
    lineage = Lineage(load_recipe(str(recipe), tmp_path), Path(os.environ["EAGLE3_STORAGE"]))
    for sensor in ("tiny_new_prompts", "tiny_automation"):
        assert _dagster("dagster", "sensor", "start", sensor).wait(timeout=120) == 0
    _dagster("dagster._daemon", "run")  # last: of two that make a new home's database, one fails
    # Nothing is made merely because sensors run: a person has the target made, and all else follows.
    target = ["--select", 'key:"tiny/target_model"']
    argv = [sys.executable, "-W", "ignore", "-m", "dagster", "asset", "materialize", "-f", "definitions.py"]
    subprocess.run([*argv, *target], cwd=ROOT, check=True, timeout=120, capture_output=True)
    wait_for(lambda: lineage.released() is not None, FLOW_S)
    _wait_until_all_runs_are_over()  # a step that is at its end looks at the prompts once more

    first = lineage.released()
    write_prompts(tmp_path / "train.jsonl", distinct_prompts(48, seed=5))
    wait_for(lambda: lineage.released() not in (None, first), FLOW_S)
    _wait_until_all_runs_are_over()
    with dg.DagsterInstance.get() as instance:
        assert {run.status for run in instance.get_runs()} == {dg.DagsterRunStatus.SUCCESS}
        of_prompts = [
            run for run in instance.get_runs() if run.asset_selection == {dg.AssetKey(["tiny", "prompts"])}
        ]
    assert len(of_prompts) == 2  # one for each content
