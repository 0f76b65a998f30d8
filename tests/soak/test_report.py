"""The report at its fullest on the real server: named sets, a grid, and the base draft beside it."""

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.record import record
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from tests.soak.test_demo import ROOT, SPEC_EVAL, run_recipe

pytestmark = pytest.mark.soak

NAMED = ("mt_bench", "gsm8k", "humaneval", "sum", "alpaca")
SMALL = {
    "prompts": {"count": 200, "per_shard": 100, "validation": 10},
    "evaluation": {"max_completion_tokens": 48, "repeats": 2},
}
GRID = {"speculative_tokens": [1], "temperature": [0.7], "concurrency": [4]}


def _write(folder: Path, name: str, **sections: Any) -> Path:
    """The demo's recipe, smaller and with other sections."""
    base = os.path.relpath(ROOT / "recipes" / "smollm2-cpu.yaml", folder)
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({"extends": base, "name": name, **SMALL, **sections}))
    return recipe


def test_a_draft_is_measured_on_named_sets_over_a_grid_and_beside_the_draft_it_went_on_from(
    tmp_path: Path,
) -> None:
    assert SPEC_EVAL in os.environ, f"{SPEC_EVAL} has to name the folder with {', '.join(NAMED)} (.jsonl)"
    folder = Path(os.environ[SPEC_EVAL]).absolute()
    first = _write(tmp_path, "first")
    run_recipe(str(first), tmp_path)
    released = Lineage(load_recipe(str(first), tmp_path), tmp_path / "data").released_draft().folder

    sets = [
        {"name": one, "path": str(folder / f"{one}.jsonl"), "column": "turns", "count": 3} for one in NAMED
    ]
    evaluation = {**SMALL["evaluation"], "sets": sets, "grid": GRID}
    second = _write(tmp_path, "second", base_draft={"path": str(released)}, evaluation=evaluation)
    minutes = run_recipe(str(second), tmp_path)
    facts = Lineage(load_recipe(str(second), tmp_path), tmp_path / "data").acceptance_report().require().facts

    settings = ("speculative_tokens", "temperature", "in_flight")
    cells = [tuple(cell[name] for name in settings) for cell in facts["grid"]]
    assert sorted(cells) == sorted(product((1, 3), (0, 0.7), (1, 4)))
    for measured in (*facts["grid"], facts["base"]):
        assert set(measured["sets"]) == set(NAMED)
        assert measured["acceptance_length"] == pytest.approx(1 + sum(measured["acceptance_by_position"]))
        assert all(one["drafts"] > 0 for one in measured["sets"].values())
    assert facts["base"]["acceptance_length"] > 1.1  # it was trained
    assert facts["acceptance_length"] > 0.95 * facts["base"]["acceptance_length"]  # and is not forgotten
    kept = (
        "acceptance_length",
        "acceptance_by_position",
        "drafts",
        "speedup",
        "speedup_least",
        "speedup_most",
    )
    record(
        "report",
        {
            "minutes": minutes,
            "base": {name: facts["base"][name] for name in kept},
            "grid": [{name: cell[name] for name in (*settings, *kept)} for cell in facts["grid"]],
            "sets": {name: {key: one[key] for key in kept} for name, one in facts["sets"].items()},
            "greedy": facts["greedy"],
        },
    )
