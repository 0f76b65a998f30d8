"""What a server counts while it answers our questions, and nobody else's.

Nothing is retried: the server would count a request that is sent twice. It would count a second user as
well, so its own number of generated tokens is compared with that of the replies.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3_pipeline.background import run_in_background
from eagle3_pipeline.errors import Busy, QualityError, ServerError
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.replies import Question, Reply, Round

if TYPE_CHECKING:
    from eagle3_pipeline.serving.metrics import ServerMetrics
    from eagle3_pipeline.serving.server import RunningServer

# vLLM counts a step just after it has handed out the step's tokens, so the counters are waited for.
_REST_POLL_S = 0.05
_REST_LIMIT_S = 5.0
# Room for counting differences at the end of replies; more than this is somebody else's request.
_FOREIGN_SHARE = 0.02


@dataclass(frozen=True)
class Counted:
    """Replies by the name of their question, and what the server counted meanwhile."""

    replies: dict[str, Reply]
    wall_seconds: float
    counters: "ServerMetrics"

    @property
    def output_tokens(self) -> int:
        """Tokens of all replies."""
        return sum(len(reply.token_ids) for reply in self.replies.values())

    def acceptance(self, name: str, speculative_tokens: int, server: "RunningServer") -> AcceptanceCounts:
        """The drafts among it; raises QualityError for none, or for another number of positions."""
        counts = AcceptanceCounts.of(self.counters)
        if (found := len(counts.accepted_per_position)) != speculative_tokens:
            raise QualityError(
                f"{name}: the server counted {found} positions, the recipe's evaluation.speculative_tokens "
                f"is {speculative_tokens}. See its log {server.log} for its speculative config."
            )
        return counts


def count_replies(
    server: "RunningServer", name: str, run: Round, questions: Sequence[Question], *, before: int = 0
) -> Counted:
    """Ask `questions` between two looks at the server's counters; the first waits for `before` tokens.

    Raises Busy (somebody else used the server), QualityError (counters that do not move), ServerDied and
    ServerError.
    """
    first = metrics_at_rest(server, before)
    started = time.monotonic()
    replies = run_in_background(lambda: run.answer(questions))
    wall_seconds = time.monotonic() - started
    tokens = sum(len(reply.token_ids) for reply in replies.values())
    counted = Counted(
        replies, wall_seconds, metrics_at_rest(server, first.generation_tokens + tokens) - first
    )
    if tokens:
        _check_alone(name, tokens, counted.counters.generation_tokens)
    return counted


def metrics_at_rest(server: "RunningServer", generated: int) -> "ServerMetrics":
    """The counters once the server is idle and has counted `generated` tokens; Busy if it stays at work.

    vLLM counts a step's drafts before its tokens, so that these are complete then, too. A count that stays
    lower is returned as it is.
    """
    from eagle3_pipeline.serving.metrics import scrape

    deadline = time.monotonic() + _REST_LIMIT_S
    while True:
        try:
            now = scrape(server.base_url)
        except ServerError:
            server.check_alive()  # a dead server has a better story to tell
            raise
        idle = not now.running and not now.waiting
        if idle and now.generation_tokens >= generated:
            return now
        if time.monotonic() > deadline:
            break
        time.sleep(_REST_POLL_S)
    if idle:
        return now
    raise Busy(
        f"the server at {server.base_url} still works {_REST_LIMIT_S:.0f} s after our last reply "
        f"({now.running} running, {now.waiting} waiting): somebody else uses it. Measure again when it is "
        "free."
    )


def _check_alone(name: str, ours: int, counted: int) -> None:
    if counted == 0:
        raise QualityError(
            f"{name}: {ours} tokens came back, but the server's counters did not move. Are /metrics and the "
            "API of the same server, and is --disable-log-stats off?"
        )
    if abs(counted - ours) > _FOREIGN_SHARE * ours:
        raise Busy(
            f"{name}: the server counted {counted} generated tokens, our replies have {ours}: somebody else "
            "used it during the measurement. Measure again when it is free."
        )
