"""One page of headless Chromium, the system's own (`apt-get install chromium`), driven by Playwright."""

import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from playwright.sync_api import Locator, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_HAS_ALL = "texts => texts.every(text => document.body.innerText.includes(text))"
_LOADED = "image => image.complete && image.naturalWidth > 0"
_IMAGES = f"images => images.filter({_LOADED}).map(one => [one.alt, one.naturalWidth, one.naturalHeight])"
_HREFS = "links => links.map(link => link.getAttribute('href'))"


class Browser:
    """One page of one browser, sizes in pixels; what it waits for in vain is playwright's TimeoutError."""

    def __init__(self, width: int = 1600, height: int = 1000) -> None:
        """Raises FileNotFoundError where Chromium is missing."""
        program = next((found for name in _NAMES if (found := shutil.which(name))), None)
        if program is None:
            raise FileNotFoundError(f"none of {', '.join(_NAMES)} is on the PATH: apt-get install chromium")
        self._playwright = sync_playwright().start()
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        try:
            self._browser = self._playwright.chromium.launch(executable_path=program, args=flags)
        except BaseException:
            self._playwright.stop()
            raise
        size: Any = {"width": width, "height": height}
        # Without a language with a region the web UI stays blank.
        self._page = self._browser.new_page(viewport=size, locale="en-US")
        self._page.set_default_timeout(60_000)

    def open(self, address: str) -> None:
        """Load a page; its scripts go on working after that."""
        self._page.goto(address, wait_until="commit")

    def wait_for(self, *texts: str) -> str:
        """The text of the page once it has all of `texts`."""
        self._page.wait_for_function(_HAS_ALL, arg=list(texts))
        return self._page.inner_text("body")

    def settle(self, limit_s: float = 20.0) -> None:
        """Wait until two looks a second apart see the same; a page that never rests is taken as it is."""
        deadline, before = time.monotonic() + limit_s, b""
        while time.monotonic() < deadline and (seen := self._page.screenshot()) != before:
            before = seen
            time.sleep(1)

    def _find(self, text: str) -> Locator:
        """The innermost element with just this text that is seen."""
        return self._page.get_by_text(text, exact=True).filter(visible=True).last

    def scroll_to(self, text: str) -> None:
        """Bring an element with just this text to where it is seen."""
        self._find(text).scroll_into_view_if_needed()

    def click(self, text: str) -> None:
        """Click an element with just this text."""
        self._find(text).click()

    def links(self) -> list[str]:
        """Where the links of the page lead, as it writes them."""
        return [str(link) for link in self._page.eval_on_selector_all("a[href]", _HREFS)]

    def images(self) -> list[tuple[str, int, int]]:
        """What is said of each image that is loaded, with its width and height."""
        found = self._page.eval_on_selector_all("img", _IMAGES)
        return [(alt, width, height) for alt, width, height in found]

    def picture(self, path: Path) -> None:
        """Write what is seen now as a PNG."""
        self._page.screenshot(path=path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._browser.close()
        self._playwright.stop()
