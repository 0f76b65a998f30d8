"""Headless Chromium (`apt-get install chromium`), driven by its DevTools protocol over a pipe: no port.

Messages are JSON objects that end with a zero byte, from us on its descriptor 3, to us on its descriptor 4.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ANSWER_S = 60.0
# Below this, descriptors are the browser's own.
_FIRST_DESCRIPTOR = 10

_MIDDLE_OF_TEXT = """
(text => {
  const has = element => element.innerText?.trim() === text && element.getClientRects().length > 0;
  const found = [...document.querySelectorAll('button, a, [role], div, span')].filter(has).pop();
  if (!found) return null;
  found.scrollIntoView({block: 'center'});
  const box = found.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
})
"""
_LINKS = "[...document.querySelectorAll('a[href]')].map(link => link.getAttribute('href'))"
_LOADED_IMAGES = """
[...document.images].filter(image => image.complete && image.naturalWidth > 0)
    .map(image => [image.alt, image.naturalWidth, image.naturalHeight])
"""


class Browser:
    """One page of one browser. Times are in seconds, sizes in pixels."""

    def __init__(self, profile: Path, width: int = 1600, height: int = 1000) -> None:
        """`profile` is an empty folder of its own; raises FileNotFoundError where Chromium is missing."""
        program = next((found for name in _NAMES if (found := shutil.which(name))), None)
        if program is None:
            raise FileNotFoundError(f"none of {', '.join(_NAMES)} is on the PATH: apt-get install chromium")
        its_input, self._input = _pipe()
        self._output, its_output = _pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += ["--remote-debugging-pipe", "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"]
        # Without a language with a region the web UI stays blank.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{its_input} 4>&{its_output}', "bash", program, *flags],
            pass_fds=(its_input, its_output),
            env={**os.environ, "LANG": "en_US.UTF-8"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        self._answers = b""
        self._number = 0
        self._session: str | None = None
        try:
            self._attach(width, height)
        except BaseException:
            self.close()
            raise

    def _attach(self, width: int, height: int) -> None:
        pages = self._call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in pages if one["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, address: str) -> None:
        """Load a page; its scripts go on working after that."""
        answer = self._call("Page.navigate", url=address)
        if problem := answer.get("errorText"):
            raise ConnectionError(f"{address}: {problem}")

    def text(self) -> str:
        """What a person reads on the page now."""
        return str(self._evaluate("document.body?.innerText ?? ''"))

    def wait_for(self, *texts: str, limit: float = 60.0) -> str:
        """The text of the page once it has all of `texts`; raises TimeoutError with what it has instead."""
        deadline = time.monotonic() + limit
        while True:
            page = self.text()
            missing = [text for text in texts if text not in page]
            if not missing:
                return page
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {limit:.0f} s the page lacks {missing}. It has:\n{page[:3000]}")
            time.sleep(0.2)

    def settle(self, limit: float = 20.0) -> None:
        """Wait until two looks a second apart see the same; a page that never rests is taken as it is."""
        deadline, before = time.monotonic() + limit, ""
        while time.monotonic() < deadline:
            seen = str(self._call("Page.captureScreenshot", format="png")["data"])
            if seen == before:
                return
            before = seen
            time.sleep(1)

    def scroll_to(self, text: str) -> tuple[float, float]:
        """Bring the innermost element that has just this text to the middle; returns its own middle.

        Raises LookupError.
        """
        middle = self._evaluate(f"{_MIDDLE_OF_TEXT}({json.dumps(text)})")
        if middle is None:
            raise LookupError(f"nothing on the page reads {text!r}. It has:\n{self.text()[:3000]}")
        x, y = middle
        return x, y

    def click(self, text: str) -> None:
        """Click what `scroll_to` finds."""
        x, y = self.scroll_to(text)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def links(self) -> list[str]:
        """Where the links of the page lead, as it writes them."""
        return [str(link) for link in self._evaluate(_LINKS)]

    def images(self) -> list[tuple[str, int, int]]:
        """What is said of each image that is loaded and drawn, with its width and height."""
        return [(alt, width, height) for alt, width, height in self._evaluate(_LOADED_IMAGES)]

    def picture(self, path: Path) -> None:
        """Write what is seen now as a PNG."""
        shot = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        os.close(self._input)  # at the end of its input it leaves by itself
        os.close(self._output)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"the page refuses {expression[:100]!r}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._input, json.dumps(message).encode() + b"\0")
        while (answer := self._next_message(method)).get("id") != self._number:
            pass  # an event
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next_message(self, method: str) -> dict[str, Any]:
        while b"\0" not in self._answers:
            if not select.select([self._output], [], [], _ANSWER_S)[0]:
                raise TimeoutError(f"the browser does not answer {method} within {_ANSWER_S:.0f} s")
            if not (read := os.read(self._output, 1 << 20)):
                raise ConnectionError(f"the browser ended at {method} with status {self._process.wait()}")
            self._answers += read
        message, _, self._answers = self._answers.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


def _pipe() -> tuple[int, int]:
    """Both ends of a pipe, out of the way of descriptors 3 and 4."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
