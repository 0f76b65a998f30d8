"""The doctor as a whole: a line per finding, whatever fails, and nothing changed by looking."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_pipeline.cli import main
from eagle3_pipeline.doctor import Finding, Mark, examination, examine
from eagle3_pipeline.errors import MissingInput, RecipeError
from eagle3_pipeline.lineage import Lineage
from tests.doctor.conftest import LineageMaker
from tests.recipes import tiny_recipe


def use_checks(
    monkeypatch: pytest.MonkeyPatch, of_machine: tuple[object, ...], of_recipe: tuple[object, ...] = ()
) -> None:
    monkeypatch.setattr(examination, "OF_MACHINE", of_machine)
    monkeypatch.setattr(examination, "OF_RECIPE", of_recipe)


def fine() -> Iterator[Finding]:
    yield Finding(Mark.OK, "all is well")


def broken() -> Iterator[Finding]:
    yield Finding(Mark.OK, "so far")
    raise ZeroDivisionError("a bug")


def too_early(lineage: Lineage) -> Iterator[Finding]:
    raise MissingInput("nothing there yet")
    yield


def refused(lineage: Lineage) -> Iterator[Finding]:
    raise RecipeError("not like this")
    yield


def test_a_finding_shows_its_mark_what_was_found_and_below_it_what_to_do() -> None:
    assert str(Finding(Mark.OK, "fine")) == "ok       fine"
    shown = str(Finding(Mark.PROBLEM, "first\nsecond", "Do this."))
    assert shown == "problem  first\n         second\n         → Do this."


def test_a_check_that_fails_is_a_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, make_lineage: LineageMaker
) -> None:
    use_checks(monkeypatch, (broken, fine), (too_early, refused))
    found = list(examine(make_lineage))
    assert [one.mark for one in found] == [Mark.OK, Mark.PROBLEM, Mark.OK, Mark.NOTE, Mark.PROBLEM]
    assert found[1].what == "broken: this check failed itself with ZeroDivisionError: a bug"
    assert found[3].what == "too early: nothing there yet"
    assert found[4].what == "refused: not like this"


def test_a_recipe_that_is_refused_is_a_line_too_and_the_machine_is_looked_at_all_the_same(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_checks(monkeypatch, (fine,))
    recipe = tiny_recipe(tmp_path, model, generation={"temprature": 1.0})
    assert main(["doctor", "--recipe", str(recipe)]) == 1
    shown = capsys.readouterr().out
    assert "ok       all is well" in shown
    assert "problem  " in shown
    assert "generation.temprature: unknown key. Did you mean temperature?" in shown
    assert shown.endswith("1 ok, 0 note, 1 problem\n")


def test_the_exit_status_is_0_without_problems(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_checks(monkeypatch, (fine,), (too_early,))
    assert main(["doctor", "--recipe", str(tiny_recipe(tmp_path, model))]) == 0
    assert capsys.readouterr().out.endswith("1 ok, 1 note, 0 problem\n")


def test_looking_at_a_machine_without_gpu_driver_or_target_raises_nothing_and_writes_nothing(
    make_lineage: LineageMaker, tmp_path: Path
) -> None:
    lineage = make_lineage(fake=True, server={"common": {"python": "/bin/false"}})
    before = sorted(tmp_path.rglob("*"))
    found = list(examine(lambda: lineage))
    assert not [one for one in found if "failed itself" in one.what]
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path(os.environ["EAGLE3_HOST_STATE"]).exists()
    checks = len(examination.OF_MACHINE) + len(examination.OF_RECIPE)
    assert len(found) >= checks
