"""The Kimi page: its plan is what `eagle3 plan` says, and its values are those of the recipe."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from eagle3_pipeline.cli import main
from eagle3_pipeline.cli.checkout import lineage_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kimi.md").read_text()
RECIPE = "kimi-k2.5-8gpu"
FREE = int(2.8e12)
# From the config of moonshotai/Kimi-K2.5.
TARGET = {"num_layers": 61, "hidden_size": 7168, "vocab_size": 163_840, "bytes": 540 * 10**9}


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_the_plan_of_the_page_is_what_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE3_STORAGE", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(3 * 10**12, 3 * 10**12 - FREE, FREE))
    target = lineage_of(RECIPE).target_model()
    target.folder.mkdir(parents=True)
    target.finish([], {"model_fingerprint": "kimi", "model_path": "/models/kimi", **TARGET})
    assert main(["plan", "--recipe", RECIPE]) == 0
    said = capsys.readouterr().out.replace(str(tmp_path), "/big-disk/eagle3")
    assert f"```\n{said}```\n" in PAGE


def test_the_values_of_the_page_are_those_of_the_recipe() -> None:
    recipe = lineage_of(RECIPE).recipe
    told = dict(re.findall(r"^\| \[`([a-z_.]+)`\]\([^)]*\) \| ([\d, ]+) \|", PAGE, flags=re.MULTILINE))
    assert len(told) >= 6
    for name, value in told.items():
        found: object = recipe
        for part in name.replace("server.common", "server.generation").split("."):
            found = getattr(found, part)
        assert str(found).strip("[]") == str(float(value)) if isinstance(found, float) else value, name
