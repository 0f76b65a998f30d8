"""The sensors of servers and of lost runs, ticked by hand."""

import os

import dagster as dg
import psutil
from dagster._core.events import EngineEventData

from eagle3_pipeline.serving.lease import hold_lease
from sensors import lost_runs_sensor, servers_sensor
from tests.records import process_of_a_server, write_record


def _tick() -> str:
    with dg.DagsterInstance.ephemeral() as instance, dg.build_sensor_context(instance=instance) as context:
        said = servers_sensor.evaluate_tick(context)
    assert not said.run_requests
    assert said.skip_message is not None
    return said.skip_message


def test_a_machine_without_servers_is_said_to_have_none() -> None:
    assert _tick() == "no server of ours runs on this machine"


def test_a_tick_shows_each_server_with_its_gpus_and_users_and_when_it_stops() -> None:
    with process_of_a_server() as process:
        record = write_record(process, gpus=("0", "1"))
        with hold_lease(("0", "1"), record.fingerprint, "generation of tiny"):
            said = _tick()
        assert f"{record}: ready, started " in said
        assert "on GPUs 0,1 " in said
        assert said.count("used by generation of tiny (pid ") == 1
        assert "stops by itself 10 min after its last use" in said
        assert "gpu-0 is held by generation of tiny (pid " in said
        assert "stops by itself at " in _tick()


def test_a_run_is_lost_only_if_its_very_process_is_gone(instance) -> None:
    began = psutil.Process().create_time()

    def started(*events: tuple[int, float]) -> str:
        """A run that is started, with engine events that name a pid at a time."""
        run = instance.add_run(dg.DagsterRun(job_name="any"))
        instance.report_dagster_event(dg.DagsterEvent("PIPELINE_START", "any"), run.run_id)
        for pid, at in events:
            told = EngineEventData.in_process(pid)
            event = dg.DagsterEvent("ENGINE_EVENT", "any", event_specific_data=told)
            instance.report_dagster_event(event, run.run_id, timestamp=at)
        return run.run_id

    untold = started()
    alive = started((os.getpid(), began + 1))
    pid_was_given_away = started((os.getpid(), began - 1))
    with dg.build_sensor_context(instance=instance) as context:
        said = [lost_runs_sensor.evaluate_tick(context) for _ in range(2)]
    assert [one.skip_message for one in said] == [f"marked as failed: {pid_was_given_away}", "no run is lost"]
    assert not said[0].run_requests
    statuses = [instance.get_run_by_id(one).status.value for one in (untold, alive, pid_was_given_away)]
    assert statuses == ["STARTED", "STARTED", "FAILURE"]


def test_the_sensors_are_one_each_per_code_location_and_run_unasked_for_they_start_nothing(load) -> None:
    sensors = load("smollm2-cpu", "qwen3-8b-1gpu").sensors
    assert [sensor.name for sensor in sensors] == ["servers", "lost_runs"]
    for sensor in (servers_sensor, lost_runs_sensor):
        assert sensor.default_status == dg.DefaultSensorStatus.RUNNING
        assert not sensor.targets
