"""`eagle3 publish`: what it says, and what a dry run leaves alone."""

from pathlib import Path

import pytest

from eagle3_pipeline.cli import main, publish
from tests.release.finished import NAME, finished


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder to which the recipe `tiny` publishes its finished release."""
    folder = tmp_path / "shared"
    lineage = finished(tmp_path, folder=str(folder))
    monkeypatch.setattr(publish, "lineage_of", lambda name: {"tiny": lineage}[name])
    return folder


def test_a_release_is_published_and_the_places_are_told(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", "--recipe", "tiny"]) == 0
    said = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert said["version"] == "v1"
    assert said["copy"] == str(shared / NAME / "v1")
    assert Path(said["released"]).is_dir()


def test_a_dry_run_says_what_would_be_sent_and_sends_nothing(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", "--recipe", "tiny", "--dry-run"]) == 0
    assert "v1: a copy of 7 files" in capsys.readouterr().out
    assert not shared.exists()


def test_a_refusal_is_told_with_status_2(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shared / NAME / "v1").mkdir(parents=True)
    assert main(["publish", "--recipe", "tiny"]) == 2
    assert "BadInput: " in capsys.readouterr().err
