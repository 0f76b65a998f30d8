"""A run that is killed -9 again and again, at random moments, still makes everything exactly once."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.record import record
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.samples.shard_file import read_samples
from tests.fakes.log import read_log
from tests.recipes import tiny_recipe

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
KILLS = 20


def test_twenty_kills_lose_nothing_and_double_nothing(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, prompts={"count": 240, "per_shard": 40})
    monkeypatch.setenv("FAKE_SECONDS_PER_TOKEN", "0.05")
    monkeypatch.setenv("FAKE_REQUEST_LOG", str(tmp_path / "requests.jsonl"))
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path / "home")}
    argv = [sys.executable, "-m", "eagle3_pipeline.cli", "run", "--recipe", str(recipe)]
    chance = random.Random(0)
    kills = 0
    while True:
        process = subprocess.Popen(argv, cwd=ROOT, env=environment, start_new_session=True)
        deadline = time.monotonic() + (chance.uniform(5, 20) if kills < KILLS else 1200)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if process.poll() is not None:
            break
        assert kills < KILLS, "the last run was not killed and did not end"
        # Half of the kills take only the command itself: what it started must end with it.
        target = os.killpg if chance.random() < 0.5 else os.kill
        target(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert (process.returncode, kills) == (0, KILLS)
    lineage = Lineage(load_recipe(str(recipe), tmp_path), Path(os.environ["EAGLE3_STORAGE"]))
    ids = [
        sample.sample_id
        for shard in lineage.recipe.shards
        for sample in read_samples(lineage.synthetic_samples(shard).folder / "samples.parquet")
    ]
    assert len(set(ids)) == len(ids) == 240
    starts = len(read_log(tmp_path / "requests.jsonl", "start"))
    record("kills", {"kills": kills, "samples": len(ids), "server_starts": starts})
