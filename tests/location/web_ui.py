"""The web UI's server and the code server behind it, without a browser or a port; runs are real processes."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import psutil
import pytest
from starlette.testclient import TestClient

from tests.location.conftest import ROOT
from tests.serving.observe import wait_for

_LAUNCH = """
mutation ($params: ExecutionParams!) { launchRun(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } } }
"""
_BACKFILL = """
mutation ($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
    __typename ... on LaunchBackfillSuccess { backfillId } ... on Error { message } } }
"""
_NODES = """
query ($keys: [AssetKeyInput!]) { assetNodes(assetKeys: $keys) { assetKey { path } %s } }
"""
_TERMINATE = """
mutation ($run: String!) { terminateRun(runId: $run, terminatePolicy: SAFE_TERMINATE) { __typename } }
"""


def _paths(names: Sequence[str]) -> list[dict[str, list[str]]]:
    return [{"path": ["tiny", name]} for name in names]


def started_pid(instance: dg.DagsterInstance, run_id: str) -> int:
    """The pid of the run's process, once it has told it."""
    found: list[int] = []

    def told() -> bool:
        logs = instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
        found.extend(int(one) for entry in logs for one in re.findall(r"run \(pid: (\d+)\)", entry.message))
        return bool(found)

    wait_for(told, 60)
    return found[0]


class WebUi:
    """The web UI's server and the code server behind it, as `dagster dev` has them."""

    def __init__(self, instance: dg.DagsterInstance, context: object, client: TestClient) -> None:
        self._instance, self._context, self._client = instance, context, client

    def launch(self, *names: str) -> str:
        """Launch assets of the pipeline; what the daemon does with a queued run is done at once."""
        selector = {
            "repositoryLocationName": "eagle3",
            "repositoryName": "__repository__",
            "jobName": "tiny_pipeline",
            "assetSelection": _paths(names),
        }
        run_id = self._ask(_LAUNCH, params={"selector": selector})["launchRun"]["run"]["runId"]
        self._instance.launch_run(run_id, self._context.create_request_context())
        return run_id

    def backfill(self, *names: str, shards: Sequence[str] | None = None) -> str:
        """What "Materialize" does with assets, over these partitions or over all; the backfill's id."""
        partitions = {"allPartitions": True} if shards is None else {"partitionNames": list(shards)}
        params = {"assetSelection": _paths(names), **partitions}
        answer = self._ask(_BACKFILL, params=params)["launchPartitionBackfill"]
        assert answer["__typename"] == "LaunchBackfillSuccess", answer
        return answer["backfillId"]

    def work_off(self, backfill_id: str) -> list[dg.DagsterRun]:
        """Do what the daemon does with a backfill until it is over; its runs in the order they were made."""
        from dagster._core.execution.backfill import BULK_ACTION_TERMINAL_STATUSES

        finished: list[dg.DagsterRun] = []
        while (asked := self._instance.get_backfill(backfill_id)).status not in BULK_ACTION_TERMINAL_STATUSES:
            assert asked.error is None, asked.error.to_string()
            for run in self.let_the_daemon_look():
                finished.append(self._finish(run.run_id))
        return finished

    def let_the_daemon_look(self) -> list[dg.DagsterRun]:
        """Let the daemon look at all backfills once; the runs that are queued then, the oldest first."""
        from dagster._daemon.backfill import execute_backfill_iteration
        from dagster._daemon.daemon import get_default_daemon_logger

        list(execute_backfill_iteration(self._context, get_default_daemon_logger("BackfillDaemon")))
        queued = dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED])
        return list(self._instance.get_runs(queued, ascending=True))

    def _finish(self, run_id: str) -> dg.DagsterRun:
        """Launch a queued run and wait for its end, which must be a success."""
        self._instance.launch_run(run_id, self._context.create_request_context())
        wait_for(lambda: self._instance.get_run_by_id(run_id).is_finished, 300)
        run = self._instance.get_run_by_id(run_id)
        failed = self._instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        assert run.is_success, [event.dagster_event.step_failure_data.error for event in failed]
        return run

    def out_of_date(self, partitioned: Sequence[str], others: Sequence[str]) -> set[str]:
        """What is marked as out of date: assets by their name, and of partitioned ones the shards as well."""
        marked = set()
        query = _NODES % "partitionKeys staleStatusByPartition"
        for node in self._ask(query, keys=_paths(partitioned))["assetNodes"]:
            statuses = zip(node["partitionKeys"], node["staleStatusByPartition"], strict=True)
            name = node["assetKey"]["path"][-1]
            marked |= {f"{name} {shard}" for shard, status in statuses if status == "STALE"}
        for node in self._ask(_NODES % "staleStatus", keys=_paths(others))["assetNodes"]:
            if node["staleStatus"] == "STALE":
                marked.add(node["assetKey"]["path"][-1])
        return marked

    def terminate(self, run_id: str) -> None:
        """What the button does."""
        answer = self._ask(_TERMINATE, run=run_id)
        assert answer["terminateRun"]["__typename"] == "TerminateRunSuccess"

    def _ask(self, query: str, **variables: object) -> dict:
        answer = self._client.post("/graphql", json={"query": query, "variables": variables}).json()
        assert "errors" not in answer, answer
        return answer["data"]


@contextmanager
def web_ui(instance: dg.DagsterInstance, recipe: Path) -> Iterator[WebUi]:
    """The web UI on the recipe `tiny`; without a daemon, whose work is done when a test says so."""
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster_webserver.app import create_app_from_workspace_process_context

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Dagster's own backfills call what Dagster calls deprecated.
        warnings.filterwarnings("ignore", message="Function `AssetSelection.sources` is deprecated")
        patch.setenv("EAGLE3_RECIPES", str(recipe))
        target = WorkspaceFileTarget([str(ROOT / "workspace.yaml")])
        with WorkspaceProcessContext(instance, target) as context:
            yield WebUi(instance, context, TestClient(create_app_from_workspace_process_context(context)))


def terminate_at(
    instance: dg.DagsterInstance, recipe: Path, asset: str, reached: Callable[[], bool]
) -> list[psutil.Process]:
    """Cancel a run of one asset in the web UI when a point is reached; the processes it had until then.

    Checked is what holds for every asset: the run is over within 15 s, and no step is tried again.
    """
    with web_ui(instance, recipe) as ui:
        run_id = ui.launch(asset)
        process = psutil.Process(started_pid(instance, run_id))
        wait_for(reached, 60)
        tree = [process, *process.children(recursive=True)]
        ui.terminate(run_id)
        wait_for(lambda: instance.get_run_by_id(run_id).is_finished, 15)
    assert instance.get_run_by_id(run_id).status == dg.DagsterRunStatus.CANCELED
    assert not instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_UP_FOR_RETRY)
    assert not instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_RESTARTED)
    assert len(tree) > 2
    return tree
