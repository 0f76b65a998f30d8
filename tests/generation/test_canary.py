"""The canary of a capturing server: it answers as a plain one, and captures what it would of a prompt."""

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import ServerDied, ServerRefused
from eagle3_pipeline.generation.canary import guarded
from tests.fakes.faults import Faults
from tests.fakes.states import write_states
from tests.generation.chat_server import ChatServer, chat_body, serve_chat

WORDS = (21, 22, 23, 24, 2)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with serve_chat() as running:
        yield running


@pytest.fixture
def other() -> Iterator[ChatServer]:
    with serve_chat() as running:
        yield running


def says(
    *token_ids: int,
    near: dict[int, float] | None = None,
    staging: Path | None = None,
    faults: Faults = Faults(),  # noqa: B008
) -> Any:
    """A server that answers everything so; `near` are what its first token had at its side, by logprob.

    With `staging` it captures; the states of what it generates have `faults`, those of prompts have none.
    """

    def behave(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        reply = chat_body()
        if staging is not None:
            is_read = "prompt" in body
            ids = body["prompt"] if is_read else [*reply["prompt_token_ids"], *token_ids][:-1]
            path = staging / f"{time.monotonic_ns()}.safetensors"
            write_states(path, ids, [1, 2, 3], 8, None, Faults() if is_read else faults)
            reply["kv_transfer_params"] = {"hidden_states_path": str(path)}
        reply["choices"][0]["token_ids"] = list(token_ids)
        if body.get("logprobs"):
            sides = [{token_ids[0]: -0.7, **(near or {})}, *({one: -0.1, 9: -3.0} for one in token_ids[1:])]
            reply["choices"][0]["logprobs"] = {"content": [_step(side) for side in sides]}
        handler.answer(200, reply)  # type: ignore[attr-defined]
        return True

    return behave


def _step(side: dict[int, float]) -> dict[str, Any]:
    top = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in side.items()]
    return {**top[0], "top_logprobs": top}


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tests.generation.chat_server.asked_id", lambda messages: "canary")
    return tmp_path / "canary" / "f.json"


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    return tmp_path / "staging"


def test_the_plain_server_is_opened_once_and_the_capturing_one_is_asked_at_each_opening(
    canary: Path, staging: Path, server: ChatServer, other: ChatServer
) -> None:
    server.behave, other.behave = says(*WORDS), says(*WORDS, staging=staging)
    for opened in (1, 2):
        with guarded(canary, staging, server.open, other.open) as running:
            assert running is other
            assert other.opened == opened
            assert len(other.bodies) == 8 * opened
            assert list(staging.glob("*.safetensors")) == []
    assert server.opened == 1
    assert len(server.bodies) == 4
    assert all(body["temperature"] == 0 for body in server.bodies + other.bodies)
    assert all(body["kv_transfer_params"]["include_output_tokens"] for body in other.bodies[::2])
    assert all(body["prompt"] == [1, 5, 6, *WORDS[:-1]] for body in other.bodies[1::2])
    assert not any("kv_transfer_params" in body for body in server.bodies)


@pytest.mark.parametrize(
    ("found", "is_right"),
    [
        ((21, 22, 23, 24, 2), True),
        ((30, 7, 7, 7, 7), True),  # as good as 21 within rounding; then it is another text
        ((31, 22, 23, 24, 2), False),  # not as good as 21
        ((21, 22, 22, 22, 22), False),
        ((21, 21, 21, 21, 21), False),
        ((21, 22, 23), False),
    ],
)
def test_a_server_that_answers_otherwise_than_by_rounding_is_refused(
    found: tuple[int, ...], is_right: bool, canary: Path, staging: Path, server: ChatServer, other: ChatServer
) -> None:
    server.behave, other.behave = says(*WORDS, near={30: -0.9, 31: -1.9}), says(*found, staging=staging)
    if is_right:
        with guarded(canary, staging, server.open, other.open):
            pass
        return
    with (
        pytest.raises(ServerRefused, match=r"does not answer as a plain one.*while_generating to false"),
        guarded(canary, staging, server.open, other.open),
    ):
        raise AssertionError("nothing may be asked of it")


@pytest.mark.parametrize("faults", [Faults(shifted_share=1), Faults(nan_share=1), Faults(short_share=1)])
def test_a_server_that_captures_other_states_while_it_generates_is_refused(
    faults: Faults, canary: Path, staging: Path, server: ChatServer, other: ChatServer
) -> None:
    server.behave, other.behave = says(*WORDS), says(*WORDS, staging=staging, faults=faults)
    with (
        pytest.raises(ServerRefused, match=r"does not capture those of a prompt .*while_generating to false"),
        guarded(canary, staging, server.open, other.open),
    ):
        raise AssertionError("nothing may be asked of it")


def test_a_server_that_leaves_no_states_of_the_canary_is_refused(
    canary: Path, staging: Path, server: ChatServer, other: ChatServer
) -> None:
    server.behave = other.behave = says(*WORDS)
    with (
        pytest.raises(ServerRefused, match="left none that can be read"),
        guarded(canary, staging, server.open, other.open),
    ):
        raise AssertionError("nothing may be asked of it")


def test_no_half_of_a_canary_is_kept_when_the_plain_server_dies(
    canary: Path, staging: Path, server: ChatServer, other: ChatServer
) -> None:
    well = says(*WORDS)

    def die(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        if len(server.bodies) < 3:
            return bool(well(handler, body))
        server.death = ServerDied("it died")
        handler.close_connection = True
        return True

    server.behave, other.behave = die, says(*WORDS, staging=staging)
    with pytest.raises(ServerDied), guarded(canary, staging, server.open, other.open):
        pass
    assert not canary.exists()
    server.behave = well
    with guarded(canary, staging, server.open, other.open):
        assert len(json.loads(canary.read_text())) == 4
