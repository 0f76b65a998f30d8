"""The jobs of one shard a run, as `dagster job backfill` takes them, and the pipeline, which it may not."""

from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

from tests.fakes.log import read_log
from tests.recipes import tiny_recipe

ROOT = Path(__file__).parents[2]
SHARDS = ["tiny-p8-s000", "tiny-p8-s001", "tiny-p8-s002"]
# Runs stay in the queue: they are looked at, and executed by the test.
_QUEUED = {
    "run_coordinator": {
        "module": "dagster._core.run_coordinator.queued_run_coordinator",
        "class": "QueuedRunCoordinator",
    }
}


def _backfill(job: str, instance: dg.DagsterInstance) -> list[dg.DagsterRun]:
    """The runs that the daemon makes of a backfill from the command line."""
    from dagster._cli.job import job_backfill_command
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster._daemon.backfill import execute_backfill_iteration
    from dagster._daemon.daemon import get_default_daemon_logger

    workspace = str(ROOT / "workspace.yaml")
    asked = CliRunner().invoke(
        job_backfill_command, ["-w", workspace, "-j", job, "--all", "yes", "--noprompt"]
    )
    assert asked.exit_code == 0, asked.output
    with WorkspaceProcessContext(instance, WorkspaceFileTarget([workspace])) as context:
        list(execute_backfill_iteration(context, get_default_daemon_logger("BackfillDaemon")))
    return sorted(
        instance.get_runs(dg.RunsFilter(job_name=job)), key=lambda run: run.tags["dagster/partition"]
    )


@pytest.fixture
def definitions(load, tmp_path: Path, tiny_llama: Path) -> dg.Definitions:
    return load(tiny_recipe(tmp_path, tiny_llama, fake=True))


def test_a_backfill_of_samples_and_of_states_is_a_run_a_shard_and_one_server_for_all(
    definitions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "requests.jsonl"
    monkeypatch.setenv("FAKE_REQUEST_LOG", str(log))
    with dg.instance_for_test(overrides=_QUEUED) as instance:

        def make(job: str, partition: str | None = None) -> None:
            made = definitions.resolve_job_def(job).execute_in_process(
                instance=instance, partition_key=partition
            )
            assert made.success

        def only(*names: str) -> None:
            chosen = [dg.AssetKey(["tiny", name]) for name in names]
            job = definitions.resolve_job_def("tiny_pipeline")
            assert job.execute_in_process(instance=instance, asset_selection=chosen).success

        only("target_model", "prompts")
        runs = _backfill("tiny_generate_samples", instance)
        assert [run.tags["dagster/partition"] for run in runs] == SHARDS
        assert not any("dagster/asset_partition_range_start" in run.tags for run in runs)
        for run in runs:
            make(run.job_name, run.tags["dagster/partition"])
        assert len(read_log(log, "start")) == 1
        only("sample_audit")
        for shard in SHARDS:
            make("tiny_extract_states", shard)
        assert len(read_log(log, "start")) == 2
        for name in ("synthetic_samples", "hidden_state_shards"):
            assert sorted(instance.get_materialized_partitions(dg.AssetKey(["tiny", name]))) == SHARDS


def test_a_run_of_the_pipeline_over_one_shard_is_refused_at_its_first_step_with_the_right_commands(
    definitions,
) -> None:
    with dg.instance_for_test(overrides=_QUEUED) as instance:
        runs = _backfill("tiny_pipeline", instance)
        assert [run.tags["dagster/partition"] for run in runs] == SHARDS
        job = definitions.resolve_job_def("tiny_pipeline")
        refused = job.execute_in_process(instance=instance, tags=runs[1].tags, raise_on_error=False)
    (step,) = (event for event in refused.all_events if event.is_step_failure)
    assert step.step_key == "tiny__target_model"
    said = step.step_failure_data.user_failure_data.description
    assert "is of the one partition tiny-p8-s001, expected all shards of the recipe in one run" in said
    assert "dagster job execute -f definitions.py -j tiny_pipeline" in said
    assert "dagster job backfill -j tiny_generate_samples --partitions tiny-p8-s001" in said
    assert "with tiny_extract_states" in said
