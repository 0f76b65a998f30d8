"""`eagle3 report` and `eagle3 compare`: what is printed, what is opened, what is refused."""

import json
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.cli import compare, main, report
from eagle3_pipeline.lineage import Lineage
from tests.evaluation import invented
from tests.release.made import made_lineage, make_checkpoint


@pytest.fixture
def lineage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lineage:
    """A trained draft, which every recipe's name leads to."""
    made = made_lineage(tmp_path)
    make_checkpoint(made, weights=False)
    for command in (report, compare):
        monkeypatch.setattr(command, "lineage_of", lambda _: made)
    return made


def finish(lineage: Lineage, **changes: Any) -> Path:
    """Make its report; returns the folder."""
    place, facts = lineage.acceptance_report(), invented.report(**changes)
    place.folder.mkdir(parents=True)
    (place.folder / "report.json").write_text(json.dumps(facts))
    (place.folder / "report.html").write_text("<!DOCTYPE html>")
    place.finish([place.folder / "report.json", place.folder / "report.html"], facts)
    return place.folder


def test_the_report_is_printed_with_the_path_of_its_page(
    lineage: Lineage, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finish(lineage)
    assert main(["report", "--recipe", "a-recipe"]) == 0
    said = capsys.readouterr().out
    assert "gsm8k" in said
    assert "The draft makes serving faster on this machine" in said
    assert said.endswith(f"as a page: {folder / 'report.html'}\n")


@pytest.mark.parametrize("opens", [True, False], ids=["a browser", "no browser"])
def test_the_page_is_opened_where_there_is_a_browser_and_else_that_is_said(
    lineage: Lineage, opens: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or opens)
    folder = finish(lineage)
    assert main(["report", "--recipe", "a-recipe", "--open"]) == (0 if opens else 1)
    assert opened == [f"file://{folder}/report.html"]
    assert ("no browser" in capsys.readouterr().err) is not opens


def test_without_a_report_it_says_what_to_make(lineage: Lineage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--recipe", "a-recipe"]) == 2
    assert "acceptance_report is not made yet" in capsys.readouterr().err


def test_a_recipe_is_compared_with_a_report_that_was_kept(
    lineage: Lineage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(lineage)
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(invented.report(**invented.numbers((0.5, 0.3, 0.2), speedup=1.5))))
    assert main(["compare", "a-recipe", str(kept)]) == 0
    said = capsys.readouterr().out
    assert "+0.300" in said
    assert "yes" in said


def test_reports_that_cannot_be_compared_are_refused_with_the_reason(
    lineage: Lineage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(lineage, temperature=0.7)
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(invented.report()))
    assert main(["compare", "a-recipe", str(kept)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("BadInput: the reports cannot be compared:")
    assert "evaluation.temperature is 0.7 in A and 0 in B" in said


def test_a_report_that_is_not_there_is_named(lineage: Lineage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "gone.json", "a-recipe"]) == 2
    assert "no file gone.json" in capsys.readouterr().err
