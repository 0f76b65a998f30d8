"""One prompt set against one running server: replies, speed, and what the server counted meanwhile.

    warm-up requests | scrape | the set's prompts, in_flight at a time | scrape
                              |<------------- wall_seconds ---------->|

The warm-up is outside of the counters and the clock. Nothing is retried: the server would count a request
that is sent twice. It would count a second user as well, so its own number of generated tokens is compared
with that of the replies.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from eagle3_pipeline.background import run_in_background
from eagle3_pipeline.errors import BadInput, Busy, QualityError, ServerError
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.replies import Reply, SetRequests
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.recipe.settings import Evaluation

if TYPE_CHECKING:
    from eagle3_pipeline.serving.metrics import ServerMetrics
    from eagle3_pipeline.serving.server import RunningServer

logger = logging.getLogger(__name__)

_WARM_UP_REQUESTS = 3
_WARM_UP_TOKENS = 32
# vLLM counts a step just after it has handed out the step's tokens, so the counters are waited for.
_REST_POLL_S = 0.05
_REST_LIMIT_S = 5.0
# Room for counting differences at the end of replies; more than this is somebody else's request.
_FOREIGN_SHARE = 0.02


@dataclass(frozen=True)
class Measurement:
    """What one set gave on one server. `replies` by prompt id; `acceptance` is None without a draft."""

    replies: dict[str, tuple[int, ...]]
    refused: tuple[str, ...]
    """Ids of the prompts that the server answered with HTTP 400 (longer than its context)."""
    output_tokens: int
    wall_seconds: float
    request_seconds: float
    """Sum over the requests; more than `wall_seconds` where several are in flight."""
    acceptance: AcceptanceCounts | None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all requests together per second of wall time."""
        return self.output_tokens / self.wall_seconds

    @property
    def seconds_per_output_token(self) -> float:
        """What one user waits per token, the prompt's processing included."""
        return self.request_seconds / self.output_tokens

    def to_json(self) -> dict[str, Any]:
        """The measurement as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """The measurement that `to_json` wrote."""
        counts = record["acceptance"]
        return cls(
            replies={prompt_id: tuple(ids) for prompt_id, ids in record["replies"].items()},
            refused=tuple(record["refused"]),
            output_tokens=record["output_tokens"],
            wall_seconds=record["wall_seconds"],
            request_seconds=record["request_seconds"],
            acceptance=None if counts is None else AcceptanceCounts.from_json(counts),
        )


def measure(
    server: "RunningServer",
    prompts: Sequence[Prompt],
    settings: Evaluation,
    *,
    name: str,
    with_draft: bool,
    request_timeout_s: float,
) -> Measurement:
    """Answer `prompts` (the first turn of each) and measure; `name` is for the log.

    Raises BadInput (no prompts, or all refused), Busy (somebody else used the server), QualityError (no or
    contradicting counts), ServerDied and ServerError.
    """
    if not prompts:
        raise BadInput(f"the evaluation set {name} has no prompts. Check its path and column in the recipe.")
    run = SetRequests(server, settings, request_timeout_s, name)
    cold = _metrics_at_rest(server, 0)
    warm_up_tokens = min(_WARM_UP_TOKENS, settings.max_completion_tokens)
    warm_up = run_in_background(lambda: run.answer(prompts[:_WARM_UP_REQUESTS], warm_up_tokens))
    before = _metrics_at_rest(server, cold.generation_tokens + _tokens(warm_up))
    started = time.monotonic()
    replies = run_in_background(lambda: run.answer(prompts, settings.max_completion_tokens))
    wall_seconds = time.monotonic() - started
    output_tokens = _tokens(replies)
    counted = _metrics_at_rest(server, before.generation_tokens + output_tokens) - before
    refused = tuple(prompt.prompt_id for prompt in prompts if prompt.prompt_id not in replies)
    if not output_tokens:
        raise BadInput(
            f"the evaluation set {name}: {len(refused)} of {len(prompts)} prompts refused, no token came back"
        )
    _check_alone(name, output_tokens, counted.generation_tokens)
    result = Measurement(
        replies={prompt_id: reply.token_ids for prompt_id, reply in replies.items()},
        refused=refused,
        output_tokens=output_tokens,
        wall_seconds=wall_seconds,
        request_seconds=sum(reply.seconds for reply in replies.values()),
        acceptance=_accepted(name, counted, settings, server.log) if with_draft else None,
    )
    logger.info(
        "%s: %d tokens in %.1f s, %.1f tokens/s", name, output_tokens, wall_seconds, result.tokens_per_second
    )
    return result


def _tokens(replies: dict[str, Reply]) -> int:
    return sum(len(reply.token_ids) for reply in replies.values())


def _metrics_at_rest(server: "RunningServer", generated: int) -> "ServerMetrics":
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


def _accepted(name: str, counted: "ServerMetrics", settings: Evaluation, log: Path) -> AcceptanceCounts:
    counts = AcceptanceCounts.of(counted)
    if (found := len(counts.accepted_per_position)) != settings.speculative_tokens:
        raise QualityError(
            f"{name}: the server counted {found} positions, the recipe's evaluation.speculative_tokens is "
            f"{settings.speculative_tokens}. See its log {log} for its speculative config."
        )
    return counts


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
