"""The demo as it is promised: how long it takes and what its draft is worth. `make soak` runs it."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.record import record
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
RUNS = 3
SPEC_EVAL = "EAGLE3_SPEC_EVAL"
"""A folder with the field's evaluation sets (mt_bench.jsonl, alpaca.jsonl: `turns` per line)."""


def run_recipe(recipe: str, folder: Path) -> float:
    """Minutes of one `eagle3 run` with storage and Dagster home in `folder`."""
    environment = {**os.environ, "EAGLE3_STORAGE": str(folder / "data"), "DAGSTER_HOME": str(folder / "home")}
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "eagle3_pipeline.cli", "run", "--recipe", recipe],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=3 * 3600,
    )
    return (time.monotonic() - began) / 60


def _report(recipe: str, folder: Path) -> dict[str, Any]:
    lineage = Lineage(load_recipe(recipe, ROOT / "recipes"), folder / "data")
    keys = ("acceptance_length", "acceptance_by_position", "speedup", "drafts")
    simulated = ("simulated_acceptance_length", "simulation_ratio", "simulation_agrees")
    facts = lineage.acceptance_report().require().facts
    training = lineage.draft_checkpoint().require().facts
    return {
        **{key: facts[key] for key in keys},
        "tokens_per_second_with": facts["tokens_per_second_with"],
        "tokens_per_second_without": facts["tokens_per_second_without"],
        **{key: facts[key] for key in simulated},
        "same_share": facts["simulation"]["same_share"],
        "sets": {name: {key: one[key] for key in keys} for name, one in facts["sets"].items()},
        "training_tokens_per_second": training["tokens"] / training["seconds"],
    }


def test_the_demo_takes_at_most_20_minutes_and_a_second_run_under_one(tmp_path: Path) -> None:
    minutes, again, reports = [], [], []
    for number in range(RUNS):
        folder = tmp_path / str(number)
        minutes.append(run_recipe("smollm2-cpu", folder))
        again.append(run_recipe("smollm2-cpu", folder))
        reports.append(_report("smollm2-cpu", folder))
    record("demo", {"minutes": minutes, "minutes_of_the_second_run": again, "reports": reports})
    assert statistics.median(minutes) <= 20
    assert statistics.median(again) < 1


def test_the_full_demo_reaches_an_acceptance_length_of_one_and_a_half_in_an_hour(tmp_path: Path) -> None:
    sets = [{"name": "everyday", "path": "everyday/evaluation.jsonl", "column": "prompt", "count": 40}]
    sets[0]["path"] = str(ROOT / "recipes" / sets[0]["path"])
    assert SPEC_EVAL in os.environ, f"{SPEC_EVAL} has to name the folder with mt_bench.jsonl and alpaca.jsonl"
    folder = Path(os.environ[SPEC_EVAL]).absolute()
    for name in ("mt_bench", "alpaca"):
        sets.append({"name": name, "path": str(folder / f"{name}.jsonl"), "column": "turns", "count": 20})
    recipe = tmp_path / "full.yaml"
    base = os.path.relpath(ROOT / "recipes" / "smollm2-cpu-full.yaml", tmp_path)
    recipe.write_text(yaml.safe_dump({"extends": base, "evaluation": {"sets": sets}}))
    minutes = run_recipe(str(recipe), tmp_path)
    report = _report(str(recipe), tmp_path)
    named = [report["sets"]["mt_bench"], report["sets"]["alpaca"]]
    drafts = sum(one["drafts"] for one in named)
    length = sum(one["acceptance_length"] * one["drafts"] for one in named) / drafts
    record("demo-full", {"minutes": minutes, "acceptance_length_on_40": length, "report": report})
    assert minutes <= 60
    assert length >= 1.5
