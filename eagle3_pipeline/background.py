"""A coroutine in a thread of its own, so that the caller's thread stays free for signals and callbacks.

A signal handler that raises (Ctrl-C, an orchestrator's cancel) interrupts whatever its thread runs.
In an event loop that may be any callback, and some swallow the exception; here it only ever
interrupts a wait, and the coroutine is then cancelled in good order.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

_T = TypeVar("_T")


class Background:
    """Runs `work()`; a context manager. Leaving it early cancels the work and waits for its end."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], on_end: Callable[[], None]) -> None:
        self._work = work
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._begun = threading.Event()
        # A daemon: a second Ctrl-C while its end is awaited must be able to end the process.
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)

    def result(self) -> None:
        """Raise what the work raised; to be called after `on_end`."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._begun.set()
            self._on_end()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._work())
        self._begun.set()
        await self._task

    def __enter__(self) -> Self:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive() and self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop closed in this very moment: the work is over
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


def run_in_background(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """What `work()` returns or raises, as from asyncio.run, with this thread free for signals."""
    results: list[_T] = []
    ended = threading.Event()

    async def keep() -> None:
        results.append(await work())

    with Background(keep, on_end=ended.set) as background:
        ended.wait()
        background.result()
    return results[0]


@contextmanager
def repeated(every_s: float, call: Callable[[], None]) -> Iterator[None]:
    """`call()` at once, every `every_s` seconds in a thread of its own, and once more at the end."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(every_s):
            call()

    thread = threading.Thread(target=work, name="repeated", daemon=True)
    call()
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        call()


async def all_or_none(workers: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines side by side to the end; the first failure cancels the others and is raised itself."""
    tasks = [asyncio.create_task(worker) for worker in workers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
