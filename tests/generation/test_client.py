import asyncio
import json
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import httpx
import pytest

from eagle3_pipeline.errors import ServerDied, ServerError, ServerRefused
from eagle3_pipeline.generation.client import GenerationClient
from eagle3_pipeline.generation.reply import Reply, RequestRefused, Unanswered, read_reply
from eagle3_pipeline.recipe.generation import Generation
from tests.generation.chat_server import chat_body

Handler = Callable[[httpx.Request], Any]
SETTINGS = Generation(concurrency=2, max_completion_tokens=64, temperature=0.5, top_p=0.9, top_k=20)


class Asking:
    """A client whose requests `answer` gets; what it sent, its pauses and its troubles are kept."""

    def __init__(self, answer: Handler, settings: Generation = SETTINGS) -> None:
        self.sent: list[dict[str, Any]] = []
        self.pauses: list[float] = []
        self.troubles: list[str] = []
        self._answer = answer
        self._settings = settings

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(json.loads(request.content))
        answer = self._answer(request)
        response: httpx.Response = await answer if asyncio.iscoroutine(answer) else answer
        return response

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def client(self, on_trouble: Callable[[str], None] | None = None) -> GenerationClient:
        return GenerationClient(
            "http://server",
            "eagle3-x",
            self._settings,
            on_trouble=on_trouble or self.troubles.append,
            transport=httpx.MockTransport(self._handle),
            sleep=self._sleep,
        )

    def ask(
        self, count: int = 1, on_trouble: Callable[[str], None] | None = None, greedy: bool = False
    ) -> list[Reply]:
        messages = [{"role": "user", "content": "hello"}]

        async def run() -> list[Reply]:
            async with self.client(on_trouble) as client:
                asking = [client.ask(messages, greedy=greedy) for _ in range(count)]
                return await asyncio.gather(*asking)

        return asyncio.run(run())


def ok(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json=chat_body())


def then_ok(*first: httpx.Response) -> Handler:
    left = list(first)
    return lambda request: left.pop(0) if left else ok(request)


def test_a_request_asks_for_token_ids_with_the_recipes_sampling_and_without_a_seed() -> None:
    asking = Asking(ok)
    (reply,) = asking.ask()
    assert asking.sent == [
        {
            "model": "eagle3-x",
            "messages": [{"role": "user", "content": "hello"}],
            "return_token_ids": True,
            "max_completion_tokens": 64,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 20,
        }
    ]
    assert reply == Reply([1, 5, 6], [11, 12, 2], "stop", "fine", "")


def test_a_greedy_request_has_temperature_zero_and_leaves_out_what_bounds_sampling() -> None:
    asking = Asking(ok)
    asking.ask(greedy=True)
    (sent,) = asking.sent
    assert sent["temperature"] == 0
    assert sent["max_completion_tokens"] == 64
    assert not {"top_p", "top_k"} & sent.keys()


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refusal_is_never_sent_again(status: int) -> None:
    asking = Asking(lambda request: httpx.Response(status, text="prompt is too long"))
    with pytest.raises(RequestRefused, match="too long"):
        asking.ask()
    assert len(asking.sent) == 1
    assert asking.troubles == []


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503])
def test_what_may_pass_is_sent_again_after_a_pause(status: int) -> None:
    asking = Asking(then_ok(httpx.Response(status), httpx.Response(status)))
    (reply,) = asking.ask()
    assert reply.content == "fine"
    assert asking.troubles == [f"HTTP {status}"] * 2
    assert len(asking.pauses) == 2


def test_attempts_are_bounded_and_their_pauses_differ() -> None:
    asking = Asking(lambda request: httpx.Response(503))
    with pytest.raises(Unanswered, match="HTTP 503"):
        asking.ask()
    assert len(asking.sent) == 6
    assert len(set(asking.pauses)) == 5
    assert all(0 <= pause <= 30 for pause in asking.pauses)


def test_the_pause_is_at_least_what_the_server_asks_for_and_not_endless() -> None:
    in_20_s = formatdate(time.time() + 20, usegmt=True)
    asking = Asking(
        then_ok(
            httpx.Response(429, headers={"retry-after": "7"}),
            httpx.Response(503, headers={"retry-after": in_20_s}),
            httpx.Response(503, headers={"retry-after": "86400"}),
            httpx.Response(503, headers={"retry-after": "soon"}),
        )
    )
    asking.ask()
    seven, date, long, senseless = asking.pauses
    assert 7 <= seven <= 8
    assert 18 <= date <= 21
    assert 60 <= long <= 61
    assert 0 <= senseless <= 30


@pytest.mark.parametrize("status", [401, 404])
def test_a_status_that_speaks_of_another_server_ends_the_job_at_once(status: int) -> None:
    asking = Asking(lambda request: httpx.Response(status, text="no such model"))
    with pytest.raises(ServerRefused, match=rf"HTTP {status} from .*no such model"):
        asking.ask()
    assert len(asking.sent) == 1


def test_connecting_writing_and_reading_each_have_a_limit() -> None:
    found = []

    def answer(request: httpx.Request) -> httpx.Response:
        found.append(request.extensions["timeout"])
        return ok(request)

    Asking(answer).ask()
    whole = SETTINGS.request_limit_s(SETTINGS.max_completion_tokens)
    assert found == [{"connect": 10, "write": 30, "read": whole, "pool": 30}]
    assert whole == 300 + 64 / 4


def test_a_lost_connection_is_tried_again() -> None:
    left = [
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("closed"),
        httpx.ConnectTimeout("no answer"),
        httpx.WriteTimeout("stuck"),
        httpx.DecodingError("not gzip"),
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        if left:
            raise left.pop(0)
        return ok(request)

    asking = Asking(answer)
    asking.ask()
    kinds = ["ConnectError", "RemoteProtocolError", "ConnectTimeout", "WriteTimeout", "DecodingError"]
    assert asking.troubles == [f"connection {kind}" for kind in kinds]


def test_whoever_hears_of_trouble_can_end_it_all() -> None:
    def died(reason: str) -> None:
        raise ServerDied("exit code -9")

    asking = Asking(lambda request: httpx.Response(500))
    with pytest.raises(ServerDied):
        asking.ask(on_trouble=died)
    assert len(asking.sent) == 1


def test_a_request_over_its_limit_is_not_sent_again() -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        return ok(request)

    asking = Asking(never, SETTINGS.model_copy(update={"request_timeout_s": 0.05}))
    with pytest.raises(Unanswered, match=r"no reply within 0\.05 s \(generation\.request_timeout_s\)"):
        asking.ask()
    assert len(asking.sent) == 1
    assert asking.troubles == ["timeout"]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thoughts_are_the_same_in_either_field(field: str) -> None:
    body = chat_body()
    body["choices"][0]["message"] = {"content": "4", field: "2 + 2"}
    assert (read_reply(body).content, read_reply(body).reasoning) == ("4", "2 + 2")


def test_null_content_is_empty_text_and_never_the_word_none() -> None:
    body = chat_body()
    body["choices"][0] |= {"message": {"content": None, "reasoning": "hm"}, "finish_reason": "length"}
    assert read_reply(body) == Reply([1, 5, 6], [11, 12, 2], "length", "", "hm")


@pytest.mark.parametrize("missing", ["token_ids", "prompt_token_ids"])
def test_a_reply_without_token_ids_says_which_server_is_wanted(missing: str) -> None:
    body = chat_body()
    (body if missing == "prompt_token_ids" else body["choices"][0])[missing] = None
    with pytest.raises(ServerError, match="return_token_ids"):
        read_reply(body)


@pytest.mark.parametrize(
    ("usage", "kept"),
    [
        (
            {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            {"prompt_tokens", "completion_tokens", "total_tokens"},
        ),
        (
            {"prompt_tokens": 3, "prompt_tokens_details": None, "completion_tokens_details": {"x": 1}},
            {"prompt_tokens"},
        ),
        (None, set()),
    ],
)
def test_the_servers_counts_are_kept_and_its_details_are_not(usage: Any, kept: set[str]) -> None:
    found = read_reply(chat_body() | {"usage": usage}).usage
    assert found.keys() == kept
    assert all(found[name] == usage[name] for name in kept)


@pytest.mark.parametrize("reason", ["abort", None])
def test_an_aborted_request_is_tried_again(reason: str | None) -> None:
    aborted = chat_body()
    aborted["choices"][0]["finish_reason"] = reason
    asking = Asking(then_ok(httpx.Response(200, json=aborted)))
    asking.ask()
    assert asking.troubles == ["aborted"]


@pytest.mark.parametrize("body", [b'{"cut', b"", b"<html>", b'{"a": "\xff"}'])
def test_a_broken_body_is_tried_again(body: bytes) -> None:
    asking = Asking(then_ok(httpx.Response(200, content=body)))
    asking.ask()
    assert asking.troubles == ["broken JSON"]


@pytest.mark.parametrize(("status", "answers"), [(200, True), (400, False), (500, False)])
def test_a_greeting_asked_once_tells_a_well_server_from_a_broken_one(status: int, answers: bool) -> None:
    asking = Asking(lambda request: httpx.Response(status, json=chat_body()))
    assert asyncio.run(asking.client().answers()) is answers
    assert [one["max_completion_tokens"] for one in asking.sent] == [1]
    assert asking.troubles == []


@pytest.mark.parametrize(
    ("first", "blames"), [((500,) * 5, True), ((503, 500, 500, 500, 500), False)], ids=["all 500", "one 503"]
)
def test_a_prompt_is_suspected_only_if_the_server_fails_at_each_attempt(
    first: tuple[int, ...], blames: bool
) -> None:
    left = [*first, 500]
    with pytest.raises(Unanswered) as raised:
        Asking(lambda request: httpx.Response(left.pop(0))).ask()
    assert raised.value.may_be_the_prompt is blames
