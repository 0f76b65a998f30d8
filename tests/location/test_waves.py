"""Recipes in waves: their jobs, and the sensor that starts them one after the other, ticked by hand."""

import os
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets import draft_checkpoint
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.wave_runs import WAVE_RUN_TAG, WaveRun, next_run
from sensors import waves
from tests.location.runs import add_run, tick_sensor
from tests.recipes import tiny_recipe

WAVE = WaveRun("tiny_wave", ("tiny-p8-s001", "tiny-p8-s002"), "wave-1", "wave 2 of 2")
PIPELINE = {"eagle3/pipeline": "tiny"}


@pytest.fixture
def definitions(load, tmp_path: Path, tiny_llama: Path) -> dg.Definitions:
    return load(tiny_recipe(tmp_path, tiny_llama, fake=True, extraction={"waves": 2}))


def tick(definitions: dg.Definitions, instance: dg.DagsterInstance) -> dg.RunRequest | str:
    """The request of one tick, or why there is none."""
    said = tick_sensor(definitions, instance, "tiny_waves")
    if said.run_requests:
        (request,) = said.run_requests
        return request
    assert said.skip_message is not None
    return said.skip_message


def stub(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    def next_run(_: Any) -> WaveRun | None:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(waves, "next_run", next_run)


def test_only_a_recipe_in_waves_has_the_jobs_and_the_sensor_of_waves(load, definitions) -> None:
    jobs = {job.name for job in definitions.resolve_all_job_defs()} - {"__ASSET_JOB"}
    of_waves = {"tiny_samples", "tiny_wave", "tiny_release"}
    assert jobs == {"tiny_pipeline", "tiny_generate_samples", "tiny_extract_states", *of_waves}
    assert "tiny_waves" in [sensor.name for sensor in definitions.sensors]
    assert "smollm2_cpu_waves" not in [sensor.name for sensor in load("smollm2-cpu").sensors]


def test_the_jobs_of_the_waves_make_every_asset_once(definitions) -> None:
    made: list[str] = []
    for name in ("samples", "wave", "release"):
        job = definitions.resolve_job_def(f"tiny_{name}")
        assert job.tags["eagle3/pipeline"] == "tiny"
        made += [key.path[-1] for key in job.asset_layer.selected_asset_keys]
    graph = definitions.resolve_asset_graph()
    assert sorted(made) == sorted(key.path[-1] for key in graph.get_all_asset_keys())
    wave = definitions.resolve_job_def("tiny_wave").asset_layer.selected_asset_keys
    assert {key.path[-1] for key in wave} == {"hidden_state_shards", "draft_checkpoint"}


def test_the_night_starts_the_samples_and_leaves_the_waves_to_the_sensor(definitions) -> None:
    assert definitions.resolve_schedule_def("tiny_nightly").job_name == "tiny_samples"


def test_the_sensor_is_off_until_switched_on(definitions) -> None:
    sensor = definitions.resolve_sensor_def("tiny_waves")
    assert sensor.default_status == dg.DefaultSensorStatus.STOPPED


def test_nothing_made_asks_for_the_samples_over_all_shards(definitions, instance) -> None:
    request = tick(definitions, instance)
    assert isinstance(request, dg.RunRequest)
    assert request.job_name == "tiny_samples"
    assert request.tags["dagster/asset_partition_range_start"] == "tiny-p8-s000"
    assert request.tags["dagster/asset_partition_range_end"] == "tiny-p8-s002"
    assert request.tags.items() >= PIPELINE.items()


def test_a_tick_asks_for_the_next_wave_with_its_range_and_its_key(
    definitions, instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch, WAVE)
    add_run(instance, "tiny_wave", dg.DagsterRunStatus.SUCCESS, {**PIPELINE, WAVE_RUN_TAG: "wave-0"})
    add_run(instance, "other_wave", dg.DagsterRunStatus.STARTED, {"eagle3/pipeline": "other"})
    request = tick(definitions, instance)
    assert isinstance(request, dg.RunRequest)
    assert (request.job_name, request.run_key) == ("tiny_wave", "wave-1")
    assert request.tags.items() >= {**PIPELINE, **WAVE.tags}.items()


@pytest.mark.parametrize("status", ["NOT_STARTED", "QUEUED", "STARTING", "STARTED", "CANCELING"])
def test_beside_any_active_run_of_the_recipe_none_is_started(
    definitions, instance, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    stub(monkeypatch, WAVE)
    run = add_run(instance, "tiny_pipeline", dg.DagsterRunStatus(status), PIPELINE)
    assert tick(definitions, instance) == f"run {run[:8]} of tiny_pipeline is {status}"


@pytest.mark.parametrize("status", ["FAILURE", "CANCELED", "SUCCESS"])
def test_a_run_that_was_there_is_not_started_again(
    definitions, instance, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    stub(monkeypatch, WAVE)
    run = add_run(instance, "tiny_wave", dg.DagsterRunStatus(status), {**PIPELINE, **WAVE.tags})
    assert f"next is wave 2 of 2, but run {run[:8]} of it is {status}" in str(tick(definitions, instance))


def test_the_end_and_what_is_damaged_are_said_and_start_nothing(
    definitions, instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch, None)
    assert tick(definitions, instance) == "the draft is released"
    stub(monkeypatch, DamagedFile("a record is torn"))
    assert tick(definitions, instance) == "DamagedFile: a record is torn"


def with_parts(lineage: Lineage) -> list[str]:
    """The shards whose states lie on the disk."""
    parts = (lineage.folder / "hidden_state_shards").glob("*/*/part-*.safetensors")
    return sorted({part.parent.name for part in parts})


def test_two_waves_make_a_draft_and_only_one_wave_of_states_is_ever_on_the_disk(
    load, instance, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, extraction={"waves": 2})
    definitions = load(recipe)
    lineage = Lineage(load_recipe(str(recipe), tmp_path), Path(os.environ["EAGLE3_STORAGE"]))
    jobs: list[str] = []
    at_training: list[list[str]] = []
    train = draft_checkpoint.train_draft

    def watched(*args: Any, **kwargs: Any) -> Any:
        at_training.append(with_parts(lineage))
        return train(*args, **kwargs)

    monkeypatch.setattr(draft_checkpoint, "train_draft", watched)
    while (run := next_run(lineage)) is not None:
        jobs.append(run.job)
        job = definitions.resolve_job_def(run.job)
        assert job.execute_in_process(instance=instance, tags=run.tags).success
        assert with_parts(lineage) == []
    assert jobs == ["tiny_samples", *["tiny_wave"] * 2, "tiny_release"]
    facts = lineage.sample_audit().require().facts
    assert facts["waves"] == at_training == [["p8-s000", "p8-s001"], ["p8-s002"]]
    lineage.released_draft().verify()
    made = instance.get_materialized_partitions(dg.AssetKey(["tiny", "hidden_state_shards"]))
    assert sorted(made) == ["tiny-p8-s000", "tiny-p8-s001", "tiny-p8-s002"]
    for shard in lineage.recipe.shards:
        assert lineage.hidden_state_shards(shard).manifest() is not None
