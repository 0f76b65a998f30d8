"""The web UI in a real browser: what a person sees of a finished recipe (`apt-get install chromium`)."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.recipes import tiny_recipe

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# The page asks its server again and again; this is how long it may until it is looked at.
PATIENCE_MS = 30_000
Look = Callable[[str], str]


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[str]:
    """The address of the web UI beside a finished recipe `tiny`, made on the stand-in of the server."""
    folder = tmp_path_factory.mktemp("ui")
    recipe = tiny_recipe(folder, tiny_llama, fake=True)
    state = {name: str(folder / name.lower()) for name in ("DAGSTER_HOME", "EAGLE3_STORAGE")}
    environment = {**os.environ, **state, "EAGLE3_HOST_STATE": str(folder / "host")}
    run = [sys.executable, "-m", "eagle3_pipeline.cli", "run", "--recipe", str(recipe)]
    subprocess.run(run, cwd=ROOT, env=environment, check=True, timeout=600)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [sys.executable, "-W", "ignore", "-m", "dagster_webserver", "-w", str(ROOT / "workspace.yaml")]
    serve += ["-h", "127.0.0.1", "-p", str(port)]
    environment["EAGLE3_RECIPES"] = str(recipe)
    with (folder / "webserver.log").open("wb") as log:
        server = subprocess.Popen(serve, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(server, address, folder / "webserver.log")
        yield address
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait(server: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            httpx.get(f"{address}/server_info", trust_env=False).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"the web server is not there:\n{log.read_text()}")


@pytest.fixture
def look(ui: str, tmp_path: Path) -> Look:
    """The page of a path, as the browser has it after its scripts ran; a picture of it lies in tmp_path."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    assert browser is not None, f"none of {BROWSERS} is on the PATH: apt-get install chromium"

    def dom(path: str) -> str:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1600,1100"]
        flags += [f"--virtual-time-budget={PATIENCE_MS}", f"--screenshot={tmp_path / 'page.png'}"]
        argv = [browser, *flags, "--dump-dom", f"{ui}{path}"]
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300).stdout

    return dom


def test_the_graph_shows_every_asset_of_the_recipe(look: Look) -> None:
    page = look("/asset-groups")
    for name in ("target_model", "prompts", "synthetic_samples", "sample_audit", "hidden_state_shards"):
        assert name in page
    for name in ("vocabulary_map", "draft_checkpoint", "acceptance_report", "released_draft"):
        assert name in page


def test_each_shard_is_a_partition_with_its_own_status(look: Look) -> None:
    page = look("/assets/tiny/synthetic_samples?view=partitions")
    for shard in ("tiny-p8-s000", "tiny-p8-s001", "tiny-p8-s002"):
        assert shard in page


def test_the_report_shows_its_numbers_and_offers_its_plot(look: Look) -> None:
    page = look("/assets/tiny/acceptance_report?view=overview")
    assert "acceptance_length" in page
    assert "acceptance_plot" in page
    assert "Show Markdown" in page  # a click shows the picture


def test_the_run_is_there_with_its_steps(look: Look) -> None:
    page = look("/runs")
    assert "tiny_pipeline" in page
    assert "Success" in page or "Succeeded" in page
