"""The sensor of the servers, ticked by hand."""

import dagster as dg

from eagle3_pipeline.serving.lease import hold_lease
from sensors import servers_sensor
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


def test_the_sensor_is_one_per_code_location_and_runs_unasked_for_it_only_looks(load) -> None:
    sensors = load("smollm2-cpu", "kimi-k2.5-8gpu").sensors
    assert [sensor.name for sensor in sensors] == ["servers"]
    assert servers_sensor.default_status == dg.DefaultSensorStatus.RUNNING
    assert not servers_sensor.targets
