"""The pictures of the guide: all are made by the script, all are shown, and none is large."""

import re
from pathlib import Path

import pytest
from PIL import Image

from scripts.browser import Browser
from scripts.screenshots import PICTURES

DOCS = Path(__file__).parents[2] / "docs"
TAKEN = sorted((DOCS / "pictures").iterdir())


def test_the_pictures_are_those_that_the_script_takes() -> None:
    assert {path.name for path in TAKEN} == {f"{name}.png" for name in PICTURES}
    for path in TAKEN:
        with Image.open(path) as picture:
            assert picture.size == PICTURES[path.stem][1:]


def test_each_picture_is_shown_on_a_page_with_words_for_who_cannot_see_it() -> None:
    pages = [path.read_text() for path in DOCS.rglob("*.md")]
    shown = {Path(link).name for page in pages for _, link in re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", page)}
    assert shown == {path.name for path in TAKEN}


def test_no_picture_is_larger_than_200_kb() -> None:
    assert {path.name: path.stat().st_size for path in TAKEN if path.stat().st_size > 200_000} == {}


def test_without_chromium_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"chromium.* is on the PATH: apt-get install chromium"):
        Browser(tmp_path / "profile")
