"""`eagle3 doctor --repair` where the daemon is down: Dagster is told of lost runs."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import dagster as dg
from dagster._core.events import EngineEventData

from tests.recipes import tiny_recipe


def test_the_doctor_tells_dagster_of_lost_runs_without_a_daemon_and_only_where_it_is_asked_to(
    eagle3: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, tiny_llama: Path
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    home = tmp_path / "home_with_runs"
    home.mkdir()
    with dg.instance_for_test(temp_dir=str(home)) as instance:
        run_id = instance.add_run(dg.DagsterRun(job_name="any")).run_id
        instance.report_dagster_event(dg.DagsterEvent("PIPELINE_START", "any"), run_id)
        told = EngineEventData.in_process(os.getpid())  # as this process is, but long before it began
        event = dg.DagsterEvent("ENGINE_EVENT", "any", event_specific_data=told)
        instance.report_dagster_event(event, run_id, timestamp=1.0)

        looked = eagle3("doctor", "--recipe", str(recipe), DAGSTER_HOME=str(home))
        assert "was lost" not in looked.stdout
        assert instance.get_run_by_id(run_id).status == dg.DagsterRunStatus.STARTED
        repaired = eagle3("doctor", "--repair", "--recipe", str(recipe), DAGSTER_HOME=str(home))
        assert f"run {run_id[:8]} was lost, and Dagster knows now that it failed" in repaired.stdout
        assert "nothing of a server that is gone is left" in repaired.stdout
        assert instance.get_run_by_id(run_id).status == dg.DagsterRunStatus.FAILURE
