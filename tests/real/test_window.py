"""A draft that looks back over a window only is served by the real vLLM as it was trained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from tests.real.agreement import JUDGES, require_agreement
from tests.recipes import tiny_recipe

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
_WINDOW = 6  # so short that a draft served with another one, or none, proposes other tokens


def test_a_draft_with_a_window_is_served_as_its_simulation_says(tmp_path: Path, tiny_llama: Path) -> None:
    recipe = tiny_recipe(
        tmp_path,
        tiny_llama,
        prompts={"count": 48, "per_shard": 24, "validation": JUDGES},
        training={"epochs": 12, "learning_rate": 3e-3, "attention_window": _WINDOW, "norm_output": True},
    )
    done = subprocess.run(
        [sys.executable, "-m", "eagle3_pipeline.cli", "run", "--recipe", str(recipe)],
        cwd=ROOT,
        env={**os.environ, "DAGSTER_HOME": str(tmp_path / "dagster_home")},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    lineage = Lineage(load_recipe(str(recipe), tmp_path), Path(os.environ["EAGLE3_STORAGE"]))
    lineage.released_draft().verify()
    released = lineage.released_draft().folder
    layer = json.loads((released / "config.json").read_text())["transformer_layer_config"]
    assert (layer["layer_types"], layer["sliding_window"]) == (["sliding_attention"], _WINDOW)
    report = lineage.acceptance_report().require().facts
    assert report["accepted_tokens"] > 0
    require_agreement(lineage.draft_checkpoint().require().facts, report)
