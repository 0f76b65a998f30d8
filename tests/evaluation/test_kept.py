from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import Busy, DamagedFile
from eagle3_pipeline.evaluation.kept import Kept

KEY = {"host": "here", "server": "f" * 64, "set": "x", "temperature": 0.0, "in_flight": 1, "repeat": 0}
OTHERS = [{"host": "elsewhere"}, {"server": "g" * 64}, {"temperature": 0.7}, {"in_flight": 2}, {"repeat": 1}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "measurements.jsonl"


def find(path: Path, key: dict[str, Any] = KEY, *, report: str = "r" * 64) -> dict[str, Any] | None:
    with Kept(path, report) as kept:
        return kept.find(key, dict)


def keep(path: Path, *found: dict[str, Any], report: str = "r" * 64) -> None:
    with Kept(path, report) as kept:
        for one in found:
            kept.keep(KEY, one)
            assert kept.find(KEY, dict) == one


@pytest.mark.parametrize("change", OTHERS, ids=lambda one: next(iter(one)))
def test_what_was_kept_is_found_by_whoever_measures_the_very_same(path: Path, change: dict[str, Any]) -> None:
    keep(path, {"tokens": 1})
    assert find(path) == {"tokens": 1}
    assert find(path, KEY | change) is None


def test_what_was_measured_last_counts(path: Path) -> None:
    keep(path, {"tokens": 1}, {"tokens": 2})
    assert find(path) == {"tokens": 2}


def test_a_kill_within_a_record_costs_that_record_only(path: Path) -> None:
    keep(path, {"tokens": 1})
    with Kept(path, "r" * 64) as kept:
        kept.keep(KEY | {"repeat": 1}, {"tokens": 2})
    path.write_bytes(path.read_bytes()[:-9])
    assert find(path) == {"tokens": 1}
    assert find(path, KEY | {"repeat": 1}) is None
    keep(path, {"tokens": 3})
    assert find(path) == {"tokens": 3}


def test_what_another_report_measured_is_set_aside(path: Path) -> None:
    keep(path, {"tokens": 1}, report="q" * 64)
    assert find(path) is None
    assert len(list(path.parent.glob("measurements.jsonl.qqq*"))) == 1


def test_a_record_of_something_else_is_told_and_not_guessed_at(path: Path) -> None:
    keep(path, {"tokens": 1})
    with Kept(path, "r" * 64) as kept, pytest.raises(DamagedFile, match=r"Move\s+the file away"):
        kept.find(KEY, lambda found: found["seconds"])


def test_one_process_at_a_time_measures_a_report(path: Path) -> None:
    with Kept(path, "r" * 64), pytest.raises(Busy, match="another process"):
        find(path)
