"""Asking a server some questions, a few at a time, and what came back."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from eagle3_pipeline.background import all_or_none
from eagle3_pipeline.errors import ServerError
from eagle3_pipeline.prompts.prompt import Prompt

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

logger = logging.getLogger(__name__)

_PROGRESS_S = 10.0
_TOKEN_ID = "token_id:"


@dataclass(frozen=True)
class Question:
    """One request, without what all have in common. `name` is the id of its prompt or sample."""

    name: str
    path: str
    body: dict[str, Any]

    @classmethod
    def first_turn(cls, prompt: Prompt, *, max_tokens: int, temperature: float) -> "Question":
        """The first turn of a prompt, as a chat."""
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages = [*system, {"role": "user", "content": prompt.turns[0]}]
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": temperature}
        return cls(prompt.prompt_id, "/v1/chat/completions", body)


@dataclass(frozen=True)
class Reply:
    """One reply: its ids as the server returned them, and seconds from the sending to the last byte."""

    token_ids: tuple[int, ...]
    seconds: float
    prompt_token_ids: tuple[int, ...]
    """What the server made of the question, chat template included."""
    likeliest: Mapping[int, float] = field(default_factory=dict)
    """Log-probabilities of the tokens that could have been the first, where the question asks for them."""


class Round:
    """The requests of one set: a few workers that share one list of questions. Nothing is sent twice."""

    def __init__(
        self, server: "RunningServer", name: str, *, in_flight: int, request_timeout_s: float
    ) -> None:
        """`name` is for the log."""
        self._server = server
        self._name = name
        self._in_flight = in_flight
        self._timeout = httpx.Timeout(request_timeout_s, connect=10.0, pool=None)

    async def answer(self, questions: Sequence[Question]) -> dict[str, Reply]:
        """Replies by the name of the question, in the order of `questions`; refused ones are left out.

        Raises ServerDied and ServerError.
        """
        replies: dict[str, Reply] = {}
        left = iter(questions)
        progress = _Progress(self._name, len(questions))
        limits = httpx.Limits(max_connections=self._in_flight)
        # Without `verify`: its certificates take 20 ms of the measured time, and the address has no TLS.
        connection = httpx.AsyncHTTPTransport(verify=False, trust_env=False, limits=limits)
        async with httpx.AsyncClient(
            base_url=self._server.base_url, timeout=self._timeout, transport=connection, trust_env=False
        ) as client:
            await all_or_none(
                self._work(client, left, replies, progress)
                for _ in range(min(self._in_flight, len(questions)))
            )
        return {one.name: replies[one.name] for one in questions if one.name in replies}

    async def _work(
        self,
        client: httpx.AsyncClient,
        left: Iterator[Question],
        replies: dict[str, Reply],
        progress: "_Progress",
    ) -> None:
        for question in left:
            reply = await self._ask(client, question)
            if reply is not None:
                replies[question.name] = reply
            progress.add(len(reply.token_ids) if reply else 0)

    async def _ask(self, client: httpx.AsyncClient, question: Question) -> Reply | None:
        """The reply, or None if the server refuses the question."""
        body = {"model": self._server.model, **question.body, "return_token_ids": True}
        started = time.monotonic()
        try:
            response = await client.post(question.path, json=body)
        except httpx.HTTPError as error:
            self._server.check_alive()
            raise ServerError(
                f"the evaluation server at {self._server.base_url} gave no reply to prompt "
                f"{question.name} of {self._name} ({type(error).__name__}: {error}), but its process "
                f"lives. See its log {self._server.log}."
            ) from error
        seconds = time.monotonic() - started
        if response.status_code == httpx.codes.BAD_REQUEST:
            logger.warning("%s: prompt %s is refused: %s", self._name, question.name, response.text[:200])
            return None
        if response.is_error:
            self._server.check_alive()
            raise ServerError(
                f"HTTP {response.status_code} for prompt {question.name} of {self._name}: "
                f"{response.text[:300]}. See the server's log {self._server.log}."
            )
        return _reply(response, seconds)


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


def _reply(response: httpx.Response, seconds: float) -> Reply:
    try:
        body = response.json()
        choice = body["choices"][0]
        # A chat has them beside its choices, a completion in each of them.
        prompt = body.get("prompt_token_ids") or choice["prompt_token_ids"]
        return Reply(tuple(choice["token_ids"]), seconds, tuple(prompt), _likeliest(choice.get("logprobs")))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ServerError(
            f"a reply without choices[0].token_ids or prompt_token_ids ({response.text[:200]}): the server "
            "does not know return_token_ids. vLLM 0.32 does: check server.evaluation.python in the recipe."
        ) from error


def _likeliest(logprobs: Mapping[str, Any] | None) -> dict[int, float]:
    """The first token's alternatives, of a question with `return_tokens_as_token_ids`."""
    if logprobs is None:
        return {}
    return {int(name.removeprefix(_TOKEN_ID)): value for name, value in logprobs["top_logprobs"][0].items()}
