"""One prompt set against one running server: replies, speed, and what the server counted meanwhile.

    warm-up requests | scrape | the set's prompts, in_flight at a time | scrape
                              |<------------- wall_seconds ---------->|

The warm-up is outside of the counters and the clock. Nothing is retried: the server would count a request
that is sent twice. It would count a second user as well, so its own number of generated tokens is compared
with that of the replies.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx

from eagle3_pipeline.background import run_in_background
from eagle3_pipeline.errors import BadInput, Busy, QualityError, ServerError
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.recipe.settings import Evaluation

if TYPE_CHECKING:
    from eagle3_pipeline.serving.metrics import ServerMetrics
    from eagle3_pipeline.serving.server import RunningServer

logger = logging.getLogger(__name__)

_WARM_UP_REQUESTS = 3
_WARM_UP_TOKENS = 32
_PROGRESS_S = 10.0
# vLLM counts a step just after it has handed out the step's tokens, so the counters are waited for.
_REST_POLL_S = 0.05
_REST_LIMIT_S = 5.0
# Room for counting differences at the end of replies; more than this is somebody else's request.
_FOREIGN_SHARE = 0.02


@dataclass(frozen=True)
class Reply:
    """One reply: its ids as the server returned them, and seconds from the sending to the last byte."""

    token_ids: tuple[int, ...]
    seconds: float


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
    run = _Run(server, settings, request_timeout_s, name)
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


class _Run:
    """The requests of one set: a few workers that share one list of prompts."""

    def __init__(
        self, server: "RunningServer", settings: Evaluation, request_timeout_s: float, name: str
    ) -> None:
        self._server = server
        self._settings = settings
        self._timeout = httpx.Timeout(request_timeout_s, connect=10.0, pool=None)
        self._name = name

    async def answer(self, prompts: Sequence[Prompt], max_tokens: int) -> dict[str, Reply]:
        """Replies by prompt id, in the order of `prompts`; refused ones are left out."""
        replies: dict[str, Reply] = {}
        left = iter(prompts)
        progress = _Progress(self._name, len(prompts))
        limits = httpx.Limits(max_connections=self._settings.in_flight)
        async with httpx.AsyncClient(
            base_url=self._server.base_url, timeout=self._timeout, limits=limits, trust_env=False
        ) as client:
            workers = [
                asyncio.create_task(self._work(client, left, max_tokens, replies, progress))
                for _ in range(min(self._settings.in_flight, len(prompts)))
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        return {
            prompt.prompt_id: replies[prompt.prompt_id] for prompt in prompts if prompt.prompt_id in replies
        }

    async def _work(
        self,
        client: httpx.AsyncClient,
        left: Iterator[Prompt],
        max_tokens: int,
        replies: dict[str, Reply],
        progress: "_Progress",
    ) -> None:
        for prompt in left:
            reply = await self._ask(client, prompt, max_tokens)
            if reply is not None:
                replies[prompt.prompt_id] = reply
            progress.add(len(reply.token_ids) if reply else 0)

    async def _ask(self, client: httpx.AsyncClient, prompt: Prompt, max_tokens: int) -> Reply | None:
        """The reply to the first turn, or None if the server refuses the prompt."""
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        body = {
            "model": self._server.model,
            "messages": [*system, {"role": "user", "content": prompt.turns[0]}],
            "max_tokens": max_tokens,
            "temperature": self._settings.temperature,
            "return_token_ids": True,
        }
        started = time.monotonic()
        try:
            response = await client.post("/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            self._server.check_alive()
            raise ServerError(
                f"the evaluation server at {self._server.base_url} gave no reply to prompt "
                f"{prompt.prompt_id} of {self._name} ({type(error).__name__}: {error}), but its process "
                f"lives. See its log {self._server.log}."
            ) from error
        seconds = time.monotonic() - started
        if response.status_code == httpx.codes.BAD_REQUEST:
            logger.warning("%s: prompt %s is refused: %s", self._name, prompt.prompt_id, response.text[:200])
            return None
        if response.is_error:
            self._server.check_alive()
            raise ServerError(
                f"HTTP {response.status_code} for prompt {prompt.prompt_id} of {self._name}: "
                f"{response.text[:300]}. See the server's log {self._server.log}."
            )
        return Reply(_token_ids(response), seconds)


class _Progress:
    """A line in the log every few seconds."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total = name, total
        self._done = self._tokens = 0
        self._started = self._told = time.monotonic()

    def add(self, tokens: int) -> None:
        self._done += 1
        self._tokens += tokens
        now = time.monotonic()
        if now - self._told >= _PROGRESS_S:
            self._told = now
            rate = self._tokens / (now - self._started)
            logger.info("%s: %d of %d replies, %.1f tokens/s", self._name, self._done, self._total, rate)


def _token_ids(response: httpx.Response) -> tuple[int, ...]:
    try:
        return tuple(response.json()["choices"][0]["token_ids"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(
            f"a reply without choices[0].token_ids ({response.text[:200]}): the server does not know "
            "return_token_ids. vLLM 0.32 does; check server.evaluation.python in the recipe."
        ) from error


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
