"""The web UI's own server on workspace.yaml: what a browser would ask it, without a browser or a port."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from starlette.testclient import TestClient

ROOT = Path(__file__).parents[2]

_ASSETS = """
{ assetNodes { assetKey { path } groupName kinds description
               partitionKeys dependencyKeys { path } isPartitioned } }
"""
_JOBS = """
{ repositoriesOrError { ... on RepositoryConnection { nodes {
    jobs { name } schedules { name } sensors { name sensorState { status } }
} } } }
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of the web server, started from another folder than the checkout."""
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster_webserver.app import create_app_from_workspace_process_context

    with pytest.MonkeyPatch.context() as patch, dg.instance_for_test() as instance:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        patch.setenv("EAGLE3_RECIPES", "smollm2-cpu")
        target = WorkspaceFileTarget([str(ROOT / "workspace.yaml")])
        with WorkspaceProcessContext(instance, target) as context:
            yield TestClient(create_app_from_workspace_process_context(context))


def _ask(browser: TestClient, query: str) -> dict:
    answer = browser.post("/graphql", json={"query": query}).json()
    assert "errors" not in answer, answer
    return answer["data"]


def test_the_graph_is_shown_with_lineage_groups_kinds_and_partitions(browser: TestClient) -> None:
    nodes = {node["assetKey"]["path"][-1]: node for node in _ask(browser, _ASSETS)["assetNodes"]}
    assert len(nodes) == 9
    assert {node["groupName"] for node in nodes.values()} == {"smollm2_cpu"}
    assert all(node["kinds"] and node["description"] for node in nodes.values())
    partitioned = {name for name, node in nodes.items() if node["isPartitioned"]}
    assert partitioned == {"synthetic_samples", "hidden_state_shards"}
    assert len(nodes["synthetic_samples"]["partitionKeys"]) == 4
    parents = {key["path"][-1] for key in nodes["hidden_state_shards"]["dependencyKeys"]}
    assert parents == {"synthetic_samples", "sample_audit"}


def test_the_pipeline_can_be_launched_by_hand_and_by_schedule(browser: TestClient) -> None:
    (repository,) = _ask(browser, _JOBS)["repositoriesOrError"]["nodes"]
    assert "smollm2_cpu_pipeline" in {job["name"] for job in repository["jobs"]}
    assert [schedule["name"] for schedule in repository["schedules"]] == ["smollm2_cpu_nightly"]


def test_servers_lost_runs_and_the_disk_are_looked_at_without_switching_anything_on(
    browser: TestClient,
) -> None:
    (repository,) = _ask(browser, _JOBS)["repositoriesOrError"]["nodes"]
    running = {sensor["name"]: sensor["sensorState"]["status"] for sensor in repository["sensors"]}
    assert {name for name, status in running.items() if status == "RUNNING"} == {
        "servers",
        "lost_runs",
        "disk",
    }


def test_the_page_itself_is_served(browser: TestClient) -> None:
    page = browser.get("/")
    assert page.status_code == 200
    assert page.text.startswith("<!DOCTYPE html>")
