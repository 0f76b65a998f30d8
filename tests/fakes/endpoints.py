"""The paths of the stand-in and what they answer, in the shapes of vLLM 0.32 (see tests/fakes/recorded)."""

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.fakes.arguments import Arguments
from tests.fakes.bodies import RefusalError, chat_body, completion_body, logprobs_body, model_card
from tests.fakes.counters import Counters
from tests.fakes.engine import Engine
from tests.fakes.faults import Faults, FaultSettings, strikes
from tests.fakes.heads import head_of
from tests.fakes.log import say, write_log
from tests.fakes.states import write_states
from tests.fakes.words import Answer, Language

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Endpoints:
    """The state of one running stand-in, and its handlers."""

    def __init__(self, arguments: Arguments, settings: FaultSettings, stop: Callable[[], Any]) -> None:
        self._arguments = arguments
        self._settings = settings
        self._stop = stop
        self._language = Language(arguments.model)
        self._head = head_of(arguments.model)
        self._draft = arguments.speculation.get("method") == "eagle3"
        self._counters = Counters(
            arguments.served_name, arguments.engines, arguments.speculative_tokens, with_draft=self._draft
        )
        self._engines = [Engine(lambda: settings.now().knee) for _ in range(arguments.engines)]
        self._slots = asyncio.Semaphore(arguments.max_num_seqs * arguments.engines)
        self._started = int(time.time())
        self._received = self._answered = self._files = 0
        self._dead = False
        self._writing: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        """What the server answers to."""
        return [
            Route("/health", self._health),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._logged(self._chat), methods=["POST"]),
            Route("/v1/completions", self._logged(self._complete), methods=["POST"]),
            Route("/detokenize", self._logged(self._detokenize), methods=["POST"]),
        ]

    async def refuse_path(self, request: Request, error: Exception) -> Response:
        """vLLM's answer to a path or method that it does not have."""
        assert isinstance(error, HTTPException)
        return JSONResponse({"detail": error.detail}, status_code=error.status_code)

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self._dead else 200)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def _metrics(self, request: Request) -> Response:
        room = self._settings.now().cache_requests
        for number, engine in enumerate(self._engines):
            self._counters.put(number, "num_requests_running", engine.running)
            self._counters.put(number, "generation_tokens_total", engine.tokens())
            self._counters.put(
                number, "kv_cache_usage_perc", min(1.0, engine.running / room) if room else 0.0
            )
        return PlainTextResponse(self._counters.text(), media_type="text/plain; version=1.0.0; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        card = model_card(self._arguments, self._started)
        return JSONResponse({"object": "list", "data": [card]})

    def _logged(
        self, handler: Callable[[Request, dict[str, Any], Faults], Coroutine[Any, Any, Response]]
    ) -> Handler:
        """A handler of POST requests behind the log, the refusals and the deaths."""

        async def handle(request: Request) -> Response:
            number = self._received
            self._received += 1
            try:
                body = await request.json()
            except ValueError:
                body = None
            write_log("request", path=request.url.path, number=number, body=body)
            try:
                faults = self._settings.now()
                self._maybe_die(faults)
                self._maybe_busy(number, faults)
                response = await handler(request, self._checked(body), faults)
            except RefusalError as refusal:
                response = refusal.response
            write_log("answer", path=request.url.path, number=number, status=response.status_code)
            return response

        return handle

    def _maybe_die(self, faults: Faults) -> None:
        if 0 <= faults.die_after_requests <= self._answered:
            os._exit(1)
        if self._dead or 0 <= faults.engine_dies_after_requests <= self._answered:
            if not self._dead:
                say("[async_llm.py:760] EngineDeadError: EngineCore encountered an issue.")
                asyncio.get_running_loop().call_later(0.3, self._stop)
            self._dead = True
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            raise RefusalError(500, message, "InternalServerError")

    def _maybe_busy(self, number: int, faults: Faults) -> None:
        if number < faults.busy_requests:
            headers = {"retry-after": faults.retry_after} if faults.retry_after else {}
            raise RefusalError(
                faults.busy_status, "the stand-in is busy", "ServiceUnavailableError", None, **headers
            )

    def _checked(self, body: Any) -> dict[str, Any]:
        if not isinstance(body, dict):
            raise RefusalError(400, "the body is no JSON object", "Bad Request")
        if body.get("model") not in (None, self._arguments.served_name):
            message = (
                f"The model `{body['model']}` does not exist. Valid aliases: {self._arguments.served_name}."
            )
            raise RefusalError(404, message, "NotFoundError", "model")
        temperature = body.get("temperature")
        if temperature is not None and temperature < 0:
            value = float(temperature)
            message = f"temperature must be non-negative, got {value}. (parameter=temperature, value={value})"
            raise RefusalError(400, message, "BadRequestError", "temperature")
        return body

    async def _chat(self, request: Request, body: dict[str, Any], faults: Faults) -> Response:
        messages = body.get("messages")
        if messages is None:
            missing = {"type": "missing", "loc": "body.messages", "msg": "Field required"}
            raise RefusalError(400, f"1 validation error:\n  {missing}", "Bad Request", "body.messages")
        if not messages:
            message = "Cannot apply chat template to an empty conversation. Provide at least one message."
            raise RefusalError(400, message, "BadRequestError")
        text = "".join(_content(message) for message in messages)
        if faults.refuse_marker and faults.refuse_marker in text:
            raise RefusalError(400, f"the stand-in refuses {faults.refuse_marker!r}", "BadRequestError")
        try:
            prompt = self._language.render(
                [{**message, "content": _content(message)} for message in messages]
            )
        except ValueError as error:
            raise RefusalError(400, str(error), "BadRequestError") from error
        name = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
        limit = self._room(prompt, body.get(name), name)
        thinks = self._arguments.reasoning_parser is not None
        identity = f"chatcmpl-{uuid.uuid4().hex[:16]}"
        answer, parameters = await self._work(request, prompt, limit, faults, identity, body, thinks=thinks)
        returns_ids = bool(body.get("return_token_ids"))
        reply = chat_body(identity, self._arguments.served_name, prompt, answer, parameters, returns_ids)
        reply["usage"]["completion_tokens_details"] = {"reasoning_tokens": 0} if thinks else None
        return JSONResponse(reply)

    async def _complete(self, request: Request, body: dict[str, Any], faults: Faults) -> Response:
        given = body.get("prompt")
        if isinstance(given, str):
            prompt = self._language.encode(given)
        elif isinstance(given, list) and given and all(isinstance(one, int) for one in given):
            prompt = given
        else:
            raise RefusalError(
                400, "the stand-in takes one prompt, as text or as token ids", "BadRequestError", "prompt"
            )
        if max(prompt) >= self._language.vocab_size:
            raise RefusalError(400, f"Token id {max(prompt)} is out of vocabulary", "BadRequestError")
        if faults.refuse_marker and faults.refuse_marker in self._language.decode(prompt):
            raise RefusalError(400, f"the stand-in refuses {faults.refuse_marker!r}", "BadRequestError")
        limit = self._room(prompt, body.get("max_tokens", 16))
        identity = f"cmpl-{uuid.uuid4().hex[:16]}"
        answer, parameters = await self._work(
            request, prompt, limit, faults, f"{identity}-0", body, thinks=False
        )
        returns_ids = bool(body.get("return_token_ids"))
        logprobs = self._logprobs(answer, body)
        return JSONResponse(
            completion_body(
                identity, self._arguments.served_name, prompt, answer, parameters, returns_ids, logprobs
            )
        )

    def _logprobs(self, answer: Answer, body: dict[str, Any]) -> dict[str, Any] | None:
        if (wanted := body.get("logprobs")) is None:
            return None
        as_ids, language = body.get("return_tokens_as_token_ids"), self._language
        return logprobs_body(
            answer.token_ids,
            lambda token: language.likeliest(token, wanted),
            lambda token: f"token_id:{token}" if as_ids else language.decode([token]),
        )

    async def _detokenize(self, request: Request, body: dict[str, Any], faults: Faults) -> Response:
        return JSONResponse({"prompt": self._language.tokenizer.decode(body["tokens"], False)})

    def _room(self, prompt: list[int], wanted: int | None, name: str = "max_tokens") -> int:
        """Tokens that the completion may have; refuses like vLLM what the context cannot hold."""
        context = self._arguments.max_model_len
        if wanted is not None and wanted > context:
            message = (
                f"{name}={wanted} cannot be greater than max_model_len={context}. Please request fewer "
                f"output tokens. (parameter={name}, value={wanted})"
            )
            raise RefusalError(400, message, "BadRequestError", name)
        if len(prompt) >= context:
            # A chat is cut while it is tokenized, so its true length is not known.
            cut = name == "max_completion_tokens"
            found = f"at least {context + 1}" if cut else f"{len(prompt)}"
            message = (
                f"This model's maximum context length is {context} tokens. However, your prompt contains "
                f"{found} input tokens, which exceeds this limit even without any output tokens. Please "
                f"reduce the length of the input prompt. (parameter=input_tokens, value={found.split()[-1]})"
            )
            raise RefusalError(400, message, "BadRequestError", "input_tokens")
        return min(wanted or context, context - len(prompt))

    async def _work(
        self,
        request: Request,
        prompt: list[int],
        limit: int,
        faults: Faults,
        identity: str,
        body: dict[str, Any],
        *,
        thinks: bool,
    ) -> tuple[Answer, dict[str, Any] | None]:
        """Queue, take the time that the tokens take, count, and write states where that is the job."""
        engine = self._counters.take_engine()
        hangs = 0 <= faults.hang_after_requests <= self._answered
        answer = self._language.answer(prompt, limit, faults, thinks=thinks)
        if self._arguments.extraction_layers and body.get("temperature") != 0:
            answer = self._language.stuck(answer)
        with _Gauge(self._counters, engine, "num_requests_waiting"):
            await self._slots.acquire()
        try:
            steps = self._steps(engine, prompt, answer, faults)
            seconds = faults.first_token_seconds + faults.seconds_per_token * (steps - 1)
            if 0 < faults.cache_requests <= self._engines[engine].running:
                self._counters.add(engine, "num_preemptions_total")
            work = self._engines[engine].run(float("inf") if hangs else seconds, len(answer.token_ids))
            with work as done:
                await _wait(request, done)
        finally:
            self._slots.release()
        self._answered += 1
        self._counters.add(engine, "prompt_tokens_total", len(prompt))
        self._counters.add(engine, "request_success_total", finished_reason=answer.finish_reason)
        return answer, self._capture(identity, prompt, answer, body, faults)

    def _steps(self, engine: int, prompt: list[int], answer: Answer, faults: Faults) -> int:
        tokens = max(1, len(answer.token_ids))
        if not self._draft:
            return tokens
        return self._counters.speculate(engine, tokens, faults.acceptance, seed=sum(prompt))

    def _capture(
        self, identity: str, prompt: list[int], answer: Answer, body: dict[str, Any], faults: Faults
    ) -> dict[str, Any] | None:
        layers = self._arguments.extraction_layers
        if not layers:
            return None
        path = self._arguments.staging / f"{identity}-{uuid.uuid4().hex[:8]}.safetensors"
        with_output = (body.get("kv_transfer_params") or {}).get("include_output_tokens", False)
        ids = (prompt + answer.token_ids)[:-1] if with_output else prompt

        async def write() -> None:
            await asyncio.sleep(faults.late_states_seconds)
            if 0 <= faults.no_room_after <= self._files:
                path.with_name(path.name + ".no-room").write_text("No space left on device (the stand-in's)")
            elif not strikes(faults.no_states_share, "no_states", ids):
                write_states(path, ids, layers, self._language.hidden_size, self._head, faults)
            self._files += 1

        task = asyncio.create_task(write())
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return {"hidden_states_path": str(path)}


class _Gauge:
    """Counts one request in a gauge for as long as the block runs."""

    def __init__(self, counters: Counters, engine: int, name: str) -> None:
        self._counters, self._engine, self._name = counters, engine, name

    def __enter__(self) -> None:
        self._counters.add(self._engine, self._name, 1)

    def __exit__(self, *_: object) -> None:
        self._counters.add(self._engine, self._name, -1)


async def _wait(request: Request, done: "asyncio.Future[None]") -> None:
    """Wait for the end of the work; a client that goes away frees its place, as in vLLM."""
    # The body has been read: all that can still come is the news that the client has gone.
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([done, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    if not done.done():
        raise RefusalError(499, "the client has gone", "RequestCancelled")


def _content(message: dict[str, Any]) -> str:
    """The text of a message, which may come in parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")
