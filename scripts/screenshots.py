"""The pictures of the guide: what the web UI shows of a finished recipe, and the page of its report.

    python -m scripts.screenshots [--recipe NAME] [--folder docs/pictures]

Looks at what EAGLE3_STORAGE (./data) and DAGSTER_HOME (./.dagster) hold: `make demo` makes it. Needs Chromium
(`apt-get install chromium`).
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from eagle3_pipeline.cli.checkout import lineage_of
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe.file import DEFAULT_RECIPE
from scripts.browser import Browser
from scripts.web_ui import CHECKOUT, web_ui

SHOW = "[Show Markdown]"
"""What the web UI has in place of a picture until it is clicked."""
# Colours of one picture: plots and text keep theirs, and a picture has a third of its bytes.
_COLORS = 128


def take_pictures(recipe: str, folder: Path, home: Path) -> list[Path]:
    """Write PICTURES of a finished recipe into `folder`, and return their paths.

    Raises MissingInput without a report, FileNotFoundError without Chromium, TimeoutError where a page does
    not come to show what it should.
    """
    lineage = lineage_of(recipe)
    lineage.acceptance_report().require()
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"DAGSTER_HOME": str(home), "EAGLE3_RECIPES": recipe}
    environment["EAGLE3_STORAGE"] = str(lineage.storage_root)
    taken = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        web_ui(Path(scratch) / "web_ui.log", environment) as address,
    ):
        for name, (view, width, height) in PICTURES.items():
            with Browser(width, height) as browser:
                view(browser, address, lineage)
                browser.settle()
                taken.append(_write(browser, folder / f"{name}.png"))
    return taken


def _graph(browser: Browser, address: str, lineage: Lineage) -> None:
    browser.open(f"{address}/locations/__repository__@eagle3/asset-groups/{lineage.recipe.slug}/lineage")
    browser.wait_for("target_model", "synthetic_samples", "released_draft")


def _partitions(browser: Browser, address: str, lineage: Lineage) -> None:
    browser.open(f"{address}/assets/{lineage.recipe.slug}/synthetic_samples?view=partitions")
    shards = [f"{lineage.recipe.slug}-{shard}" for shard in lineage.recipe.shards]
    browser.wait_for(*shards, f"Materialized ({len(shards)})")
    browser.click(shards[-1])
    browser.wait_for("completion_length_plot")


def _asset(browser: Browser, address: str, lineage: Lineage) -> None:
    browser.open(f"{address}/assets/{lineage.recipe.slug}/acceptance_report?view=overview")
    browser.wait_for("acceptance_length", "acceptance_plot", SHOW)
    browser.scroll_to("acceptance_length")


def _plot(browser: Browser, address: str, lineage: Lineage) -> None:
    browser.open(f"{address}/assets/{lineage.recipe.slug}/draft_checkpoint?view=overview")
    browser.wait_for("loss_plot", SHOW)
    browser.click(SHOW)
    browser.wait_for("Close")


def _run(browser: Browser, address: str, lineage: Lineage) -> None:
    browser.open(f"{address}/runs")
    browser.wait_for(f"{lineage.recipe.slug}_pipeline")
    run = next(link for link in browser.links() if link.startswith("/runs/"))
    browser.open(f"{address}{run}")
    browser.wait_for("released_draft", "Success")


def _report(browser: Browser, address: str, lineage: Lineage) -> None:
    browser.open((lineage.acceptance_report().folder / "report.html").as_uri())
    browser.wait_for(lineage.recipe.name)


PICTURES: dict[str, tuple[Callable[[Browser, str, Lineage], None], int, int]] = {
    "graph": (_graph, 1440, 900),
    "run": (_run, 1440, 1000),
    "partitions": (_partitions, 1440, 900),
    "asset": (_asset, 1440, 900),
    "plot": (_plot, 1440, 760),
    "report": (_report, 1100, 1160),
}
"""What each picture shows, with its width and height in pixels."""


def _write(browser: Browser, path: Path) -> Path:
    browser.picture(path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(_COLORS).save(path, optimize=True)
    return path


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="scripts.screenshots", description="The pictures of the guide.")
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help="a finished recipe (%(default)s)")
    parser.add_argument("--folder", type=Path, default=CHECKOUT / "docs" / "pictures")
    options = parser.parse_args()
    home = Path(os.environ.get("DAGSTER_HOME", CHECKOUT / ".dagster"))
    for path in take_pictures(options.recipe, options.folder, home.absolute()):
        print(f"{path.stat().st_size / 1000:6.0f} KB  {path}")


if __name__ == "__main__":
    main()
