from pathlib import Path

import pytest

from eagle3_pipeline.serving.loading import seconds_to_load

RECORDED = Path(__file__).parents[1] / "fakes" / "recorded"


def log(folder: Path, name: str, up: str | None) -> Path:
    line = f"(APIServer pid=1) INFO {up} [entry.py:140] Starting vLLM server on http://127.0.0.1:1\n"
    path = folder / name
    path.write_text("(EngineCore pid=2) INFO 01-01 00:00:00 [core.py:1] loading\n" + (line if up else ""))
    return path


@pytest.mark.parametrize("phase", ["generation", "extraction", "speculation"])
def test_the_line_is_found_in_every_recorded_log(tmp_path: Path, phase: str) -> None:
    copy = tmp_path / "evaluation-20261130T102600-abcdef.log"
    copy.write_bytes((RECORDED / f"{phase}.log").read_bytes())
    seconds = seconds_to_load(tmp_path)
    assert seconds is not None
    assert 0 < seconds < 120


def test_the_last_evaluation_server_that_came_up_counts(tmp_path: Path) -> None:
    log(tmp_path, "evaluation-20261130T100000-aaaaaa.log", "11-30 10:09:00")
    log(tmp_path, "evaluation-20261130T110000-bbbbbb.log", "11-30 11:22:00")
    log(tmp_path, "evaluation-20261130T120000-cccccc.log", None)
    log(tmp_path, "evaluation-20261130T120000-cccccc.watcher.log", None)
    log(tmp_path, "generation-20261130T130000-dddddd.log", "11-30 13:00:05")
    assert seconds_to_load(tmp_path) == 22 * 60


def test_without_an_evaluation_server_another_phases_counts(tmp_path: Path) -> None:
    log(tmp_path, "extraction-20261130T110000-aaaaaa.log", "11-30 11:00:09")
    log(tmp_path, "generation-20261130T100000-bbbbbb.log", "11-30 10:00:07")
    assert seconds_to_load(tmp_path) == 7


def test_a_server_may_load_over_new_year(tmp_path: Path) -> None:
    log(tmp_path, "evaluation-20261231T235930-aaaaaa.log", "01-01 00:00:30")
    assert seconds_to_load(tmp_path) == 60


def test_where_no_server_came_up_nothing_is_known(tmp_path: Path) -> None:
    assert seconds_to_load(tmp_path / "absent") is None
    log(tmp_path, "evaluation-20261130T100000-aaaaaa.log", None)
    log(tmp_path, "evaluation-by-hand.log", "11-30 10:09:00")
    assert seconds_to_load(tmp_path) is None
