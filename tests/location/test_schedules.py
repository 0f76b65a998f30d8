"""The nightly schedule, ticked by hand."""

import os
from pathlib import Path

import dagster as dg
import pytest

from eagle3_pipeline.at_work import at_work
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.lineage import Lineage
from tests.location.runs import add_run, tick_schedule
from tests.recipes import tiny_recipe

JOB, NIGHTLY = "smollm2_cpu_pipeline", "smollm2_cpu_nightly"
TAGS = {"eagle3/pipeline": "smollm2_cpu"}
# What happens to a run, and its status after it.
LIFE = [
    (None, dg.DagsterRunStatus.NOT_STARTED),
    (dg.DagsterEventType.RUN_ENQUEUED, dg.DagsterRunStatus.QUEUED),
    (dg.DagsterEventType.RUN_STARTING, dg.DagsterRunStatus.STARTING),
    (dg.DagsterEventType.RUN_START, dg.DagsterRunStatus.STARTED),
    (dg.DagsterEventType.RUN_SUSPENDED, dg.DagsterRunStatus.SUSPENDED),
    (dg.DagsterEventType.RUN_CANCELING, dg.DagsterRunStatus.CANCELING),
]
ENDS = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)


def test_the_night_is_skipped_from_the_making_of_a_run_of_the_job_to_its_end(load, instance) -> None:
    definitions = load("smollm2-cpu")
    run_id = add_run(instance, JOB, dg.DagsterRunStatus.NOT_STARTED, TAGS)
    for event, status in LIFE:
        if event is not None:
            instance.report_dagster_event(dg.DagsterEvent(event.value, JOB), run_id)
        said = tick_schedule(definitions, instance, NIGHTLY)
        assert isinstance(said, dg.SkipReason), status
        assert said.skip_message == f"run {run_id[:8]} of {JOB} is {status.value}"
    instance.report_dagster_event(dg.DagsterEvent(dg.DagsterEventType.RUN_CANCELED.value, JOB), run_id)
    assert isinstance(tick_schedule(definitions, instance, NIGHTLY), dg.RunRequest)


def test_the_night_is_skipped_beside_a_run_of_any_job_of_the_recipe(
    load, instance, tmp_path: Path, tiny_llama: Path
) -> None:
    definitions = load(tiny_recipe(tmp_path, tiny_llama, fake=True, extraction={"waves": 2}))
    run_id = add_run(instance, "tiny_wave", dg.DagsterRunStatus.STARTED, {"eagle3/pipeline": "tiny"})
    said = tick_schedule(definitions, instance, "tiny_nightly")
    assert isinstance(said, dg.SkipReason)
    assert said.skip_message == f"run {run_id[:8]} of tiny_wave is STARTED"


def test_a_free_night_starts_the_job_over_all_its_shards(load, instance) -> None:
    for status in ENDS:
        add_run(instance, JOB, status, TAGS)
    add_run(instance, "another_pipeline", dg.DagsterRunStatus.STARTED, {"eagle3/pipeline": "another"})
    definitions = load("smollm2-cpu")
    said = tick_schedule(definitions, instance, NIGHTLY)
    assert isinstance(said, dg.RunRequest)
    assert said.tags["dagster/asset_partition_range_start"] == "smollm2_cpu-p100-s000"
    assert said.tags["dagster/asset_partition_range_end"] == "smollm2_cpu-p100-s003"
    assert said.tags["eagle3/pipeline"] == "smollm2_cpu"
    assert said.tags.items() >= definitions.resolve_job_def(JOB).tags.items()


def test_the_night_is_skipped_while_a_step_works_on_the_recipe_from_wherever_it_was_started(
    load, instance
) -> None:
    definitions = load("smollm2-cpu")
    with at_work(Path(os.environ["EAGLE3_STORAGE"], "smollm2_cpu")):
        said = tick_schedule(definitions, instance, NIGHTLY)
    assert isinstance(said, dg.SkipReason)
    assert said.skip_message.startswith("a step works on smollm2_cpu, of a run of single assets or from")
    assert isinstance(tick_schedule(definitions, instance, NIGHTLY), dg.RunRequest)


def test_the_night_is_skipped_where_the_draft_is_released_and_not_where_something_is_damaged(
    load, instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    definitions = load("smollm2-cpu")
    monkeypatch.setattr(Lineage, "released", lambda _: "a manifest")
    said = tick_schedule(definitions, instance, NIGHTLY)
    assert isinstance(said, dg.SkipReason)
    assert said.skip_message == "the draft is released, and nothing that it is made from has changed"

    def damaged(_: Lineage) -> None:
        raise DamagedFile("a manifest is torn")

    monkeypatch.setattr(Lineage, "released", damaged)
    assert isinstance(tick_schedule(definitions, instance, NIGHTLY), dg.RunRequest)
