"""When to stop asking: a server that died, or one that lives and answers nobody.

Without it, each of 25,000 prompts would be tried and given up in seconds after the server's death.
"""

from collections.abc import Callable

from eagle3_pipeline.errors import ServerStalled

# One lost connection may be an idle one that the server closed just then; two are looked into.
_TROUBLES_TO_CHECK = 2
# Requests that were given up after all their attempts, or at which a server failed that answers a greeting,
# with no reply to anybody in between.
_MOST_GIVEN_UP = 5


class Breaker:
    """Counts troubles in a row; `check_alive` raises ServerDied when the server's process ended."""

    def __init__(self, check_alive: Callable[[], object]) -> None:
        self._check_alive = check_alive
        self._troubles = 0
        self._given_up = 0

    def replied(self) -> None:
        """The server answered."""
        self._troubles = self._given_up = 0

    def trouble(self, reason: str) -> None:
        """An attempt failed; raises ServerDied when several did and the process is gone."""
        self._troubles += 1
        if self._troubles >= _TROUBLES_TO_CHECK:
            self._check_alive()

    def gave_up(self, reason: str) -> None:
        """A request failed for good; raises ServerDied, or ServerStalled after several in a row."""
        self._check_alive()
        self._given_up += 1
        if self._given_up >= _MOST_GIVEN_UP:
            raise ServerStalled(
                f"{self._given_up} requests in a row got no reply (the last: {reason}), though the server's "
                "process lives. What was answered is recorded; the rest stays to be done. Read the server's "
                "log; if replies only take long, raise generation.request_timeout_s or lower "
                "generation.concurrency."
            )
