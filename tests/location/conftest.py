"""The code location as Dagster loads it, on a tiny target and the stand-in of the server."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import dagster as dg
import pytest

from eagle3_pipeline.serving.server import stop_servers
from tests.fakes.log import read_log

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_server_afterwards() -> Iterator[None]:
    """A run leaves its server to the next one; a test does not."""
    yield
    stop_servers(())


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dg.Definitions]:
    """Load definitions.py anew for the given recipes (names or paths)."""

    def definitions(*recipes: str | Path) -> dg.Definitions:
        monkeypatch.setenv("EAGLE3_RECIPES", ",".join(map(str, recipes)))
        monkeypatch.delitem(sys.modules, "definitions", raising=False)
        module: ModuleType = __import__("definitions")
        return module.defs

    return definitions


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance on disk, for runs whose steps have processes of their own."""
    with dg.instance_for_test(temp_dir=str(tmp_path)) as made:
        yield made


@pytest.fixture
def requests_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], int]:
    """Let the stand-in log its requests, and count those to a path."""
    log = tmp_path / "requests.jsonl"
    monkeypatch.setenv("FAKE_REQUEST_LOG", str(log))

    def count(path: str) -> int:
        return sum(one["path"] == path for one in read_log(log, "request"))

    return count


@pytest.fixture
def eagle3(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line as a user does, in a process of its own, with a Dagster home of this test."""
    home = tmp_path / "dagster_home"
    home.mkdir()

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "eagle3_pipeline.cli", *arguments],
            cwd=ROOT,
            env={**os.environ, "DAGSTER_HOME": str(home), **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )

    return run
