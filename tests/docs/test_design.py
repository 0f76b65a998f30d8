"""What the design page says of the code: its contracts, and the places that it names."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "eagle3_pipeline"
PAGE = (ROOT / "docs" / "design.md").read_text()


def test_the_contracts_of_the_page_are_those_that_are_checked() -> None:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    table = PAGE.partition("| contract | why |\n|---|---|\n")[2].partition("\n\n")[0]
    told = [row.split("|")[1].strip() for row in table.splitlines()]
    assert told == [one["name"] for one in checked]


def test_every_place_of_the_library_that_is_named_exists() -> None:
    named = set(re.findall(r"`([a-z_/]+(?:/|\.py))`", PAGE))
    assert {"recipe/", "journal.py", "serving/lease.py"} <= named
    assert {name for name in named if not ((LIBRARY / name).exists() or (ROOT / name).exists())} == set()


def test_every_package_of_the_library_is_named() -> None:
    packages = {path.parent.name for path in LIBRARY.glob("*/__init__.py")}
    assert {name for name in packages if f"`{name}/`" not in PAGE} == set()
