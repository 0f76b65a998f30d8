"""An invented training for the tests of its benchmarks."""

from pathlib import Path

import pytest

from benchmarks.training.invented import Shape, make_plan
from benchmarks.training.their_data import write_their_data
from eagle3_pipeline.recipe.training import Training
from eagle3_pipeline.training.plan import TrainingPlan

TINY = Shape(64, 2, 1, 32, 96, 300, 128, 12)


@pytest.fixture(scope="package")
def plan(tmp_path_factory: pytest.TempPathFactory) -> TrainingPlan:
    """A training of twenty invented samples, four to a step."""
    folder = tmp_path_factory.mktemp("invented")
    return make_plan(folder, TINY, Training(tokens_per_step=128), samples=20, tokens=32)


@pytest.fixture(scope="package")
def data(plan: TrainingPlan) -> Path:
    """The same samples as speculators has them."""
    return write_their_data(Path(plan.folder).parent / "data", plan)
