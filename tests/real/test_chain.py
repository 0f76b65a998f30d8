"""The whole graph as a user runs it, on the real vLLM: from prompts to a draft that it speculates with."""

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


def test_one_command_leads_from_prompts_to_a_draft_that_vllm_serves(tmp_path: Path, tiny_llama: Path) -> None:
    recipe = tiny_recipe(
        tmp_path,
        tiny_llama,
        prompts={"count": 48, "per_shard": 24, "validation": JUDGES},
        training={"epochs": 12, "learning_rate": 3e-3},
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
    report = lineage.acceptance_report().require().facts
    assert report["drafts"] > 0
    assert report["accepted_tokens"] > 0
    assert report["acceptance_length"] == pytest.approx(1 + sum(report["acceptance_by_position"]))
    require_agreement(lineage.draft_checkpoint().require().facts, report)
    lineage.released_draft().verify()
    released = lineage.released_draft().folder
    assert {"config.json", "model.safetensors", "README.md", "provenance.json", "SHA256SUMS"} <= {
        path.name for path in released.iterdir()
    }
    assert "acceptance length" in done.stdout
    status = [sys.executable, "-m", "eagle3_pipeline.cli", "server", "status"]
    left = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True)
    assert left.stdout.strip() == "no server of ours runs on this machine"
