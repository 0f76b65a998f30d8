"""The web UI in a real browser: what a person sees of a finished recipe (`apt-get install chromium`)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from scripts.browser import Browser
from scripts.screenshots import PICTURES, SHOW, take_pictures
from scripts.web_ui import web_ui
from tests.recipes import tiny_recipe

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
ASSETS = (
    *("target_model", "prompts", "synthetic_samples", "sample_audit", "hidden_state_shards"),
    *("vocabulary_map", "draft_checkpoint", "acceptance_report", "released_draft"),
)
SHARDS = ("tiny-p8-s000", "tiny-p8-s001", "tiny-p8-s002")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[str, str]:
    """Where a finished recipe `tiny` is, made on the stand-in of the server: variables of the environment."""
    folder = tmp_path_factory.mktemp("ui")
    recipe = tiny_recipe(folder, tiny_llama, fake=True)
    names = ("DAGSTER_HOME", "EAGLE3_STORAGE", "EAGLE3_HOST_STATE")
    state = {name: str(folder / name.lower()) for name in names}
    run = [sys.executable, "-m", "eagle3_pipeline.cli", "run", "--recipe", str(recipe)]
    subprocess.run(run, cwd=ROOT, env={**os.environ, **state}, check=True, timeout=600)
    return {**state, "EAGLE3_RECIPES": str(recipe)}


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory, finished: dict[str, str]) -> Iterator[str]:
    """The address of the web UI beside it."""
    with web_ui(tmp_path_factory.mktemp("log") / "web_ui.log", finished) as address:
        yield address


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A page that is still blank."""
    with Browser() as page:
        yield page


def test_the_graph_shows_every_asset_of_the_recipe(ui: str, browser: Browser) -> None:
    browser.open(f"{ui}/asset-groups")
    browser.wait_for(*ASSETS)


def test_each_shard_is_a_partition_with_its_own_status(ui: str, browser: Browser) -> None:
    browser.open(f"{ui}/assets/tiny/synthetic_samples?view=partitions")
    browser.wait_for(*SHARDS, "Materialized")


def test_the_report_shows_its_numbers_and_its_picture(ui: str, browser: Browser) -> None:
    browser.open(f"{ui}/assets/tiny/acceptance_report?view=overview")
    browser.wait_for("acceptance_length", "acceptance_plot", SHOW)
    before = browser.images()
    browser.click(SHOW)
    browser.wait_for("Close")
    browser.settle()
    shown = [image for image in browser.images() if image not in before]
    assert [alt for alt, width, height in shown if width > 300 and height > 150] != []


def test_the_run_is_there_with_its_steps(ui: str, browser: Browser) -> None:
    browser.open(f"{ui}/runs")
    page = browser.wait_for("tiny_pipeline")
    assert "Success" in page or "Succeeded" in page


def test_the_script_takes_the_pictures_of_the_guide(
    finished: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in finished.items():
        monkeypatch.setenv(name, value)
    taken = take_pictures(finished["EAGLE3_RECIPES"], tmp_path, Path(finished["DAGSTER_HOME"]))
    assert [path.stem for path in taken] == list(PICTURES)
    for path in taken:
        with Image.open(path) as picture:
            assert picture.width >= 1000
            assert len(picture.convert("L").getcolors(256)) > 10, f"{path.name} is blank"
