"""Watches that a server in use makes tokens: one that answers /health and does nothing is as good as dead.

vLLM's API process answers /health and /v1/models while its engine hangs in a kernel, a collective or a driver
call. Its counters tell: requests are there and no token comes. Such a server is ended, and so its requests
fail at once instead of each waiting for its own time limit.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from eagle3_pipeline.errors import Eagle3Error, ServerStalled
from eagle3_pipeline.serving.metrics import ServerMetrics, scrape
from eagle3_pipeline.serving.record import ServerRecord
from eagle3_pipeline.serving.stopping import stop_server

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_NEWS_EVERY_S = 60.0


@contextmanager
def watch_liveness(record: ServerRecord, limit_s: float) -> Iterator[None]:
    """Watch a ready server from a thread; one that is stalled for `limit_s` is ended, its record says why.

    Those who use it then get no answers, and `RunningServer.check_alive` raises ServerStalled.
    """
    left = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(record, limit_s, left), name=f"liveness of {record.served_name}", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join(timeout=30)


def _watch(record: ServerRecord, limit_s: float, left: threading.Event) -> None:
    progress = Progress(limit_s)
    while not left.wait(min(_LOOK_EVERY_S, limit_s / 4)):
        try:
            metrics = scrape(record.base_url)
        except ServerStalled:
            metrics = None
        if not record.alive():
            return  # whoever uses it finds out by the first request that fails
        reason = progress.look(metrics, time.monotonic())
        if reason is None:
            continue
        error = ServerStalled(
            f"{record} is stalled: {reason}. It was ended. Look at the end of {record.log}; if it only works "
            f"slowly, raise server.{record.phase}.stall_timeout_s (now {limit_s:.0f})."
        )
        logger.warning("%s", error)
        try:
            stop_server(record, error)
        except Eagle3Error as failure:  # another user's: its own process ends it
            logger.warning("%s", failure)
        return


class Progress:
    """Whether a server's counters move while it has requests."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last: ServerMetrics | None = None
        self._moved_at: float | None = None
        self._told: tuple[float, int] | None = None

    def look(self, metrics: ServerMetrics | None, now: float) -> str | None:
        """Take a reading (None: no answer) at `now` in seconds; in words why it is stalled, or None."""
        if self._moved_at is None or self._moves(metrics):
            self._moved_at = now
        if metrics is not None:
            self._last = metrics
            self._tell(metrics, now)
        still_s = now - self._moved_at
        if still_s < self._limit_s:
            return None
        if metrics is None:
            return f"/metrics gave no answer for {still_s:.0f} s"
        requests = f"{metrics.running} running and {metrics.waiting} waiting requests"
        return f"{requests} got no token for {still_s:.0f} s, though /metrics answers"

    def _moves(self, metrics: ServerMetrics | None) -> bool:
        if metrics is None:
            return False
        if self._last is None or metrics.running + metrics.waiting == 0:
            return True
        return _work(metrics) != _work(self._last)

    def _tell(self, metrics: ServerMetrics, now: float) -> None:
        """A line a minute while there are requests."""
        if self._told is None:
            self._told = (now, metrics.generation_tokens)
        told_at, tokens = self._told
        if now - told_at < _NEWS_EVERY_S:
            return
        self._told = (now, metrics.generation_tokens)
        if metrics.running + metrics.waiting:
            rate = (metrics.generation_tokens - tokens) / (now - told_at)
            logger.info(
                "the server has %d running and %d waiting requests, %.0f tokens/s, KV cache %.0f %% used, "
                "%d preemptions",
                *(metrics.running, metrics.waiting, rate, 100 * metrics.kv_cache_usage, metrics.preemptions),
            )


def _work(metrics: ServerMetrics) -> tuple[int, int]:
    # Tokens of prompts count: an extraction makes one token of its own per sample.
    return metrics.generation_tokens, metrics.prompt_tokens
