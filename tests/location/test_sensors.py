"""Which sensors there are, and the one that shows the servers, ticked by hand."""

import dagster as dg

from eagle3_pipeline.serving.lease import hold_lease
from sensors import servers_sensor
from tests.recipes import tiny_recipe
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


LOOKING = ("servers", "lost_runs", "disk")
"""They run unasked."""
STARTING = ("tiny_new_prompts", "tiny_automation", "tiny_waves")


def test_what_starts_runs_is_off_until_switched_on_and_what_only_looks_is_on(
    load, tmp_path, tiny_llama, monkeypatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, extraction={"waves": 2})
    sensors = {sensor.name: sensor for sensor in load(recipe, "smollm2-cpu").sensors}
    of_the_other = {f"smollm2_cpu_{name}" for name in ("new_prompts", "automation")}
    assert set(sensors) == {*LOOKING, "failures", *STARTING, *of_the_other}
    for name, sensor in sensors.items():
        on = dg.DefaultSensorStatus.RUNNING if name in LOOKING else dg.DefaultSensorStatus.STOPPED
        assert sensor.default_status == on, name
    assert not any(sensors[name].targets for name in LOOKING)
    assert not any(sensor.name == "default_automation_condition_sensor" for sensor in sensors.values())


def test_messages_of_failures_are_on_where_somebody_can_be_reached(load, monkeypatch) -> None:
    monkeypatch.setenv("EAGLE3_SLACK_WEBHOOK", "http://127.0.0.1:9/hook")
    sensor = load("smollm2-cpu").resolve_sensor_def("failures")
    assert sensor.default_status == dg.DefaultSensorStatus.RUNNING
