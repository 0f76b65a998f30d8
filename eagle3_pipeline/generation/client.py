"""The HTTP client of the generation server: one question, one reply, with bounded patience.

Whoever asks holds a slot already (see Job), so that time in a queue of ours never counts against the
limit, and there is no wait for a connection. Tried again, with growing and jittered pauses: what may pass
(no connection, HTTP 408, 409, 425, 429, 5xx). Not tried again: HTTP 400, 413 and 422 (refusals) and a
request that ran over its limit (it would take as long once more).
"""

import asyncio
import email.utils
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential

from eagle3_pipeline.errors import ServerRefused
from eagle3_pipeline.generation.reply import Reply, RequestRefused, Unanswered, read_reply
from eagle3_pipeline.recipe.generation import Generation
from eagle3_pipeline.serving.connections import Connections

_PASSING_STATUS = {408, 409, 425, 429}
_REFUSALS = {400, 413, 422}
_ATTEMPTS = 6
_LONGEST_PAUSE_S = 30.0
_CONNECT_S = 10.0
_WRITE_S = 30.0
# Each request has a connection of its own, so nobody waits for one; a wait would be an error of ours.
_POOL_S = 30.0

Message = dict[str, str]


class GenerationClient:
    """Asks one server for chat completions; an async context manager.

    `on_trouble(reason)` hears of every attempt that failed and may raise to end it all. `also` is what each
    question carries beside messages and sampling settings.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        settings: Generation,
        *,
        also: Mapping[str, Any] = {},
        on_trouble: Callable[[str], None] = lambda reason: None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._model = model
        self._also = also
        self._limit_s = settings.request_limit_s(settings.max_completion_tokens)
        self._on_trouble = on_trouble
        self._sleep = sleep
        # A reply comes whole, when it is complete: the silence before it lasts as long as the request.
        self._timeout = httpx.Timeout(connect=_CONNECT_S, read=self._limit_s, write=_WRITE_S, pool=_POOL_S)
        self._connections = Connections(base_url, transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connections.aclose()

    def sampling(self, *, greedy: bool = False) -> dict[str, Any]:
        """The sampling settings of a question."""
        return sampling_of(self._settings, greedy=greedy)

    async def ask(self, messages: list[Message], *, greedy: bool = False) -> Reply:
        """The reply to a conversation; raises RequestRefused, Unanswered, ServerRefused and ServerError."""
        body = {"model": self._model, "messages": messages, "return_token_ids": True}
        body |= {**self.sampling(greedy=greedy), **self._also}
        blames_prompt = True
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, Unanswered) and error.again),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=_pause,
            sleep=self._sleep,
            reraise=True,
        ):
            with attempt:
                try:
                    return await self._attempt(body)
                except Unanswered as trouble:
                    # One lost connection among the failures, and it may be the server's.
                    blames_prompt = trouble.may_be_the_prompt = blames_prompt and trouble.may_be_the_prompt
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def answers(self) -> bool:
        """Whether the server answers a prompt that nothing can be wrong with, asked once, with one token."""
        messages = [{"role": "user", "content": "Hello!"}]
        body = {"model": self._model, "messages": messages, "return_token_ids": True}
        try:
            _judge(await self._send({**body, **self.sampling(), "max_completion_tokens": 1}))
        except (RequestRefused, Unanswered):
            return False
        return True

    async def _attempt(self, body: dict[str, Any]) -> Reply:
        try:
            return _judge(await self._send(body))
        except Unanswered as trouble:
            self._on_trouble(trouble.reason)
            raise

    async def _send(self, body: dict[str, Any]) -> httpx.Response:
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._connections.post("/v1/chat/completions", body, self._timeout)
        except (TimeoutError, httpx.ReadTimeout) as error:
            detail = f"no reply within {self._limit_s:g} s (generation.request_timeout_s)"
            raise Unanswered("timeout", detail, again=False) from error
        except httpx.RequestError as error:
            raise Unanswered(f"connection {type(error).__name__}", str(error), again=True) from error


def sampling_of(settings: Generation, *, greedy: bool = False) -> dict[str, Any]:
    """The sampling settings of a request. No seed: vLLM's CPU backend dies of one.

    `greedy` takes the likeliest token always, so nothing is left for nucleus and top-k to bound.
    """
    if greedy:
        return {"max_completion_tokens": settings.max_completion_tokens, "temperature": 0.0}
    names = ("max_completion_tokens", "temperature", "top_p", "top_k")
    return {name: getattr(settings, name) for name in names}


def _judge(response: httpx.Response) -> Reply:
    status = response.status_code
    if status == 200:
        try:
            body = response.json()
        except ValueError as error:
            raise Unanswered("broken JSON", response.text[:200], again=True) from error
        return read_reply(body)
    text = response.text[:500]
    if status in _REFUSALS:
        raise RequestRefused(text)
    if status in _PASSING_STATUS or status >= 500:
        wait_s = _retry_after_s(response.headers.get("retry-after"))
        raise Unanswered(
            f"HTTP {status}", text, again=True, may_be_the_prompt=status == 500, retry_after_s=wait_s
        )
    raise ServerRefused(
        f"HTTP {status} from {response.request.url}: {text}. Expected 200, or 400 for a prompt that does not "
        "fit: look whether the server is of this recipe (`/v1/models`) and read its log."
    )


def _retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds a number or an HTTP date; None where it has no sense."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


_growing = wait_random_exponential(multiplier=1, max=_LONGEST_PAUSE_S)


def _pause(state: RetryCallState) -> float:
    """What the server asks for and a little more, so that not all come at once; else a random pause."""
    error = state.outcome.exception() if state.outcome else None
    jittered = float(_growing(state))
    asked = error.retry_after_s if isinstance(error, Unanswered) else None
    return jittered if asked is None else min(asked, 2 * _LONGEST_PAUSE_S) + min(jittered, 1.0)
