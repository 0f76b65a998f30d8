"""`eagle3 run` of a recipe in waves: run after run, and the end with the first one that fails."""

from pathlib import Path

import pytest

from eagle3_pipeline import wave_runs
from eagle3_pipeline.cli import main, run
from eagle3_pipeline.wave_runs import WaveRun
from tests.recipes import tiny_recipe

RUNS = [WaveRun(f"tiny_{name}", ("tiny-p8-s000", "tiny-p8-s001"), name, name) for name in ("samples", "wave")]


class Dagster:
    """Stands for Dagster: notes which jobs are run with which tags, and says how each ends."""

    def __init__(self, *statuses: int, advances: bool = True) -> None:
        self.statuses, self.advances = list(statuses), advances
        self.started: list[tuple[str, dict[str, str] | None]] = []
        self.done = 0

    def execute(self, job: str, _: dict[str, str], tags: dict[str, str] | None = None) -> int:
        self.started.append((job, tags))
        status = self.statuses[len(self.started) - 1]
        self.done += status == 0 and self.advances
        return status

    def next_run(self, _: object) -> WaveRun | None:
        return RUNS[self.done] if self.done < len(RUNS) else None


@pytest.fixture
def recipe(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("eagle3_pipeline.summary.summary", lambda _: "the table")
    return str(tiny_recipe(tmp_path, tiny_llama, fake=True, extraction={"waves": "auto"}))


def stand_in(monkeypatch: pytest.MonkeyPatch, dagster: Dagster) -> Dagster:
    monkeypatch.setattr(run, "_execute", dagster.execute)
    monkeypatch.setattr(wave_runs, "next_run", dagster.next_run)
    return dagster


def test_the_runs_are_started_in_order_each_with_its_range(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dagster = stand_in(monkeypatch, Dagster(0, 0))
    assert main(["run", "--recipe", recipe]) == 0
    assert dagster.started == [(one.job, one.tags) for one in RUNS]
    assert "the table" in capsys.readouterr().out


def test_the_first_failure_is_the_end_and_the_same_command_goes_on_there(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dagster = stand_in(monkeypatch, Dagster(0, 1, 0))
    assert main(["run", "--recipe", recipe]) == 1
    assert "The same command goes on from there." in capsys.readouterr().out
    assert main(["run", "--recipe", recipe]) == 0
    assert [job for job, _ in dagster.started] == ["tiny_samples", "tiny_wave", "tiny_wave"]


def test_a_run_that_changes_nothing_is_not_started_for_ever(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dagster = stand_in(monkeypatch, Dagster(0, 0, advances=False))
    assert main(["run", "--recipe", recipe]) == 2
    assert "ended well, and the same is still to be done" in capsys.readouterr().err
    assert len(dagster.started) == 1
