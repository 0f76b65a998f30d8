"""A base draft is fetched while samples are made, and a download that fails stops only what needs it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
import pytest

from eagle3_pipeline import model_place
from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from tests.drafts import make_draft
from tests.hub import serve_hub
from tests.recipes import tiny_recipe

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
SHARDS = ["tiny-p8-s000", "tiny-p8-s001", "tiny-p8-s002"]
LAYERS = {"layers": [1, 2, 3, 4]}
BASE = {"hub_id": "some/draft"}


def test_it_is_downloaded_while_samples_are_made(tmp_path, tiny_llama, instance, requests_sent) -> None:
    """The hub holds its weights back until prompts were sent: neither step waits for the other."""
    folder = make_draft(tmp_path / "draft", tiny_llama)
    recipe = tiny_recipe(tmp_path / "recipe", tiny_llama, fake=True, base_draft=BASE, extraction=LAYERS)
    waited: list[bool] = []

    def held_back(name: str) -> None:
        if name != "model.safetensors":
            return
        until = time.monotonic() + 240
        while not requests_sent(CHAT) and time.monotonic() < until:
            time.sleep(0.05)
        waited.append(requests_sent(CHAT) > 0)

    with serve_hub() as hub:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        commit = hub.push("some/draft", {**files, "training_state.pt": b"never"})
        hub.before_file = held_back
        names = ("target_model", "base_draft", "prompts", "synthetic_samples")
        selected = " or ".join(f'key:"tiny/{name}"' for name in names)
        argv = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "dagster",
            "asset",
            "materialize",
            "-f",
            "definitions.py",
        ]
        argv += ["--select", selected, "--partition-range", f"{SHARDS[0]}...{SHARDS[-1]}"]
        environment = {
            **hub.environment(tmp_path / "cache"),
            "HF_HUB_DOWNLOAD_TIMEOUT": "300",
            "DAGSTER_HOME": instance.root_directory,
            "EAGLE3_RECIPES": str(recipe),
        }
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert waited == [True]
    lineage = Lineage(load_recipe(str(recipe), tmp_path), Path(os.environ["EAGLE3_STORAGE"]))
    assert lineage.base_draft().require().facts["revision"] == commit
    assert all(lineage.synthetic_samples(shard).manifest() for shard in lineage.recipe.shards)
    assert not [one for one in hub.asked if one.endswith(".pt")]


def test_a_failed_download_stops_only_the_vocabulary_and_the_training(
    load, instance, tmp_path, tiny_llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Path:
        raise BadInput("some/draft at main can be neither downloaded nor found in the local cache")

    monkeypatch.setattr(model_place, "download", fails)
    recipe = tiny_recipe(tmp_path / "recipe", tiny_llama, fake=True, base_draft=BASE, extraction=LAYERS)
    job = load(recipe).resolve_job_def("tiny_pipeline")
    run = job.execute_in_process(instance=instance, raise_on_error=False)
    assert not run.success
    failed = {event.step_key for event in run.all_events if event.is_step_failure}
    assert {step.removeprefix("tiny__") for step in failed} == {"base_draft"}
    made = {event.step_key.removeprefix("tiny__") for event in run.all_events if event.is_step_success}
    assert made == {"target_model", "prompts", "synthetic_samples", "sample_audit", "hidden_state_shards"}
    states = instance.get_materialized_partitions(dg.AssetKey(["tiny", "hidden_state_shards"]))
    assert sorted(states) == SHARDS
