"""The sensor of lost runs, ticked by hand: which are lost, and which of them are worth another attempt."""

import os
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import psutil
import pytest
from dagster._core.events import EngineEventData

from eagle3_pipeline.at_work import at_work
from resources import Storage
from sensors import lost_runs_sensor

RECIPE = {"eagle3/pipeline": "tiny"}
# Below the smallest time of a process that has this pid: it is another one.
LONG_AGO = 1.0


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """As dagster.yaml has it: a run is tried again only where its tag says so."""
    retries = {"enabled": True, "max_retries": 0, "retry_on_asset_or_op_failure": False}
    with dg.instance_for_test(temp_dir=str(tmp_path), overrides={"run_retries": retries}) as made:
        yield made


def _started(
    instance: dg.DagsterInstance, *events: tuple[int, float], at: float = LONG_AGO, **run: object
) -> str:
    """A run that is started, with engine events that name a pid at a time."""
    run_id = instance.add_run(dg.DagsterRun(job_name="any", **run)).run_id
    instance.report_dagster_event(dg.DagsterEvent("PIPELINE_START", "any"), run_id, timestamp=at)
    for pid, told_at in events:
        told = EngineEventData.in_process(pid)
        event = dg.DagsterEvent("ENGINE_EVENT", "any", event_specific_data=told)
        instance.report_dagster_event(event, run_id, timestamp=told_at)
    return run_id


def _gone(instance: dg.DagsterInstance, **run: object) -> str:
    """A started run whose process is gone."""
    # Dagster finds the runs that go back to the same one by their tag.
    root = {"dagster/root_run_id": str(run["root_run_id"])} if run else {}
    return _started(instance, (os.getpid(), LONG_AGO), tags=RECIPE | root, **run)


def _tick(instance: dg.DagsterInstance) -> str:
    storage = Storage(root=os.environ["EAGLE3_STORAGE"])
    with dg.build_sensor_context(instance=instance, resources={"storage": storage}) as context:
        said = lost_runs_sensor.evaluate_tick(context)
    assert not said.run_requests
    return str(said.skip_message)


def _write(name: str, at: float | None = None) -> Path:
    path = Path(os.environ["EAGLE3_STORAGE"], "tiny", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}\n")
    if at is not None:
        os.utime(path, (at, at))
    return path


def _status(instance: dg.DagsterInstance, run_id: str) -> str:
    return instance.get_run_by_id(run_id).status.value


def test_a_run_is_lost_only_if_its_very_process_is_gone(instance) -> None:
    began = psutil.Process().create_time()
    untold = _started(instance)
    alive = _started(instance, (os.getpid(), began + 1))
    pid_was_given_away = _started(instance, (os.getpid(), began - 1))
    assert [_tick(instance) for _ in range(2)] == [
        f"marked as failed: {pid_was_given_away}",
        "no run is lost",
    ]
    statuses = [_status(instance, one) for one in (untold, alive, pid_was_given_away)]
    assert statuses == ["STARTED", "STARTED", "FAILURE"]


def test_a_run_is_not_lost_while_a_step_works_on_its_recipe_wherever_that_is(instance) -> None:
    run_id = _gone(instance)
    with at_work(Path(os.environ["EAGLE3_STORAGE"], "tiny")):
        assert _tick(instance) == "no run is lost"
    with at_work(Path(os.environ["EAGLE3_STORAGE"], "other")):
        assert _tick(instance) == f"marked as failed: {run_id}"


@pytest.mark.parametrize(
    "result",
    [
        "synthetic_samples/0123/p8-s000/replies.jsonl",
        "hidden_state_shards/0123/p8-s000/part-0.safetensors",
        "draft_checkpoint/0123/checkpoints/12/weights.safetensors",
        "prompts/0123/manifest.json",
    ],
)
def test_a_lost_run_that_made_something_is_launched_again_by_dagster(instance, result: str) -> None:
    run_id = _gone(instance)
    _write(result)
    _tick(instance)
    run = instance.get_run_by_id(run_id)
    assert run.tags["dagster/will_retry"] == "true"
    (failure,) = instance.all_logs(run_id, dg.DagsterEventType.RUN_FAILURE)
    assert failure.message.endswith("It made something since it began, so it is worth another attempt.")


def test_a_lost_run_of_single_assets_is_known_by_their_keys(instance) -> None:
    assets = frozenset({dg.AssetKey(["tiny", "prompts"])})
    run_id = _started(instance, (os.getpid(), LONG_AGO), asset_selection=assets)
    _write("prompts/0123/manifest.json")
    _tick(instance)
    assert instance.get_run_by_id(run_id).tags["dagster/will_retry"] == "true"


def test_a_lost_run_that_got_nowhere_is_not_launched_again(instance) -> None:
    """Its logs and its news grew, and what was made before it is older."""
    run_id = _gone(instance)
    _write("prompts/0123/manifest.json", at=LONG_AGO - 1)
    _write("logs/generation.jsonl")
    _write("progress/synthetic_samples.jsonl")
    _write("draft_checkpoint/0123/plan.json")
    _tick(instance)
    assert instance.get_run_by_id(run_id).tags["dagster/will_retry"] == "false"


def test_a_run_is_launched_again_three_times_at_most_however_much_it_makes(instance) -> None:
    first = _gone(instance)
    will: list[str] = []
    again = first
    for _ in range(4):
        _write("prompts/0123/manifest.json")
        _tick(instance)
        will.append(instance.get_run_by_id(again).tags["dagster/will_retry"])
        # What Dagster's daemon does then.
        again = _gone(instance, root_run_id=first, parent_run_id=again)
    assert will == ["true", "true", "true", "false"]
