"""A backfill over many partitions from the web UI: how the daemon takes it."""

import time
from pathlib import Path

import dagster as dg
import pytest
from starlette.testclient import TestClient

from tests.recipes import tiny_recipe

ROOT = Path(__file__).parents[2]
_LAUNCH = """
mutation ($params: LaunchBackfillParams!) {
    launchPartitionBackfill(backfillParams: $params) {
        __typename ... on LaunchBackfillSuccess { backfillId } } }
"""
# Runs stay in the queue: what is asked is how many there are.
_QUEUED = {
    "run_coordinator": {
        "module": "dagster._core.run_coordinator.queued_run_coordinator",
        "class": "QueuedRunCoordinator",
    }
}


def test_two_thousand_partitions_are_one_run_and_not_two_thousand(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster._daemon.backfill import execute_backfill_iteration
    from dagster._daemon.daemon import get_default_daemon_logger
    from dagster_webserver.app import create_app_from_workspace_process_context

    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, prompts={"count": 2000, "per_shard": 1})
    monkeypatch.setenv("EAGLE3_RECIPES", str(recipe))
    monkeypatch.chdir(ROOT)
    params = {"assetSelection": [{"path": ["tiny", "synthetic_samples"]}], "allPartitions": True}
    with dg.instance_for_test(overrides=_QUEUED) as instance:
        target = WorkspaceFileTarget([str(ROOT / "workspace.yaml")])
        with WorkspaceProcessContext(instance, target) as context:
            browser = TestClient(create_app_from_workspace_process_context(context))
            query = {"query": _LAUNCH, "variables": {"params": params}}
            answer = browser.post("/graphql", json=query).json()["data"]["launchPartitionBackfill"]
            assert answer["__typename"] == "LaunchBackfillSuccess"
            began = time.process_time()  # what else runs on the machine is no matter of the code
            for _ in range(3):
                list(execute_backfill_iteration(context, get_default_daemon_logger("BackfillDaemon")))
            seconds = time.process_time() - began
        (run,) = instance.get_runs()
        assert run.status is dg.DagsterRunStatus.QUEUED
        ends = (
            run.tags["dagster/asset_partition_range_start"],
            run.tags["dagster/asset_partition_range_end"],
        )
        assert ends == ("tiny-p1-s000", "tiny-p1-s1999")
        assert seconds < 30  # a daemon that is busy for longer is taken for dead
