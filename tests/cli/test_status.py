"""`eagle3 status`: how far steps are, below what is made."""

import os
import re
from pathlib import Path

import pytest

from eagle3_pipeline.cli import main
from eagle3_pipeline.cli.checkout import lineage_of
from eagle3_pipeline.progress_file import ProgressFile
from tests.recipes import tiny_recipe


def status(recipe: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The parts of what it prints, which an empty line separates."""
    assert main(["status", "--recipe", str(recipe)]) == 0
    return re.sub(r"\b\d s ago", "just now", capsys.readouterr().out).split("\n\n")


def test_status_shows_how_far_a_step_is_while_it_works_and_after_it(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama)
    assert len(status(recipe, capsys)) == 2
    with ProgressFile(lineage_of(str(recipe)).progress, "synthetic_samples") as progress:
        progress.write({"line": "3/24 replies, 8 in flight"})
        table, during, servers = status(recipe, capsys)
    now = f"running (pid {os.getpid()}, just now)"
    assert during == f"  synthetic_samples    {now}: 3/24 replies, 8 in flight"
    assert status(recipe, capsys) == [
        table,
        "  synthetic_samples    ended just now: 3/24 replies, 8 in flight",
        servers,
    ]
    assert "\n  synthetic_samples    waits for what is above\n" in table
