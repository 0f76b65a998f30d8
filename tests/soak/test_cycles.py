"""Twenty lives of a real server in a row, none of which leaves anything behind."""

import os
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.record import record
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.target import make_target
from tests.real.cycle import Cycle, live_once
from tests.recipes import tiny_recipe

pytestmark = pytest.mark.soak

CYCLES = 20


def test_twenty_servers_in_a_row_leave_nothing_behind(tmp_path: Path, tiny_llama: Path) -> None:
    recipe = tiny_recipe(tmp_path / "recipe", tiny_llama)
    lineage = Lineage(load_recipe(str(recipe), recipe.parent), Path(os.environ["EAGLE3_STORAGE"]))
    make_target(lineage)
    cycles: list[Cycle] = []
    for _ in range(CYCLES):
        cycles.append(live_once(recipe, lineage, tmp_path / "logs"))
    seconds = {name: [getattr(one, name) for one in cycles] for name in asdict(cycles[0])}
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    record("server-cycles", {"cycles": CYCLES, "median_seconds": middle, "seconds": seconds})
    assert max(seconds["to_attached"]) < 1
