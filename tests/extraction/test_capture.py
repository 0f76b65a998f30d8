import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from eagle3_pipeline.errors import NotEnoughRoom, ServerDied, ServerRefused, ServerStalled
from eagle3_pipeline.extraction.capture import Capture, Captured, SampleRefusedError

IDS = [5, 6, 7]
Answer = Callable[[int], Any]


def _file(path: Path) -> Path:
    save_file({"hidden_states": torch.ones(3, 2, 4), "token_ids": torch.tensor(IDS)}, path)
    return path


def _named(path: Path) -> httpx.Response:
    return httpx.Response(200, json={"kv_transfer_params": {"hidden_states_path": str(path)}})


class _Server:
    """Answers with what `answer(number of the request)` returns or raises."""

    def __init__(self, answer: Answer) -> None:
        self.count = 0
        self._answer = answer

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.count += 1
        answer = self._answer(self.count - 1)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, httpx.Response)
        return answer


def _fetch(
    staging: Path, server: _Server, alive: Callable[[], None] = lambda: None, **settings: Any
) -> Captured:
    async def fetch() -> Captured:
        transport = httpx.MockTransport(server)
        values = {"first_wait_s": 0.0, "file_timeout_s": 5.0} | settings
        async with Capture("http://x", "m", staging, 4, alive, transport=transport, **values) as capture:
            return await capture.fetch(IDS)

    return asyncio.run(fetch())


def test_the_file_is_loaded_and_gone_from_staging(tmp_path: Path) -> None:
    captured = _fetch(tmp_path, _Server(lambda number: _named(_file(tmp_path / "a.safetensors"))))
    assert captured.token_ids.tolist() == IDS
    assert captured.states.sum() == 24  # readable after its file is gone
    assert not list(tmp_path.iterdir())


def test_a_file_that_appears_after_the_answer_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    def late(number: int) -> httpx.Response:
        _file(tmp_path / "hidden")
        threading.Timer(0.05, lambda: (tmp_path / "hidden").rename(path)).start()
        return _named(path)

    assert _fetch(tmp_path, _Server(late)).token_ids.tolist() == IDS


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        httpx.RemoteProtocolError("hung up"),
        httpx.ReadTimeout("slow"),
        httpx.Response(500, text="engine"),
        httpx.Response(503, headers={"retry-after": "0"}),
        httpx.Response(429),
    ],
)
def test_trouble_of_connection_and_server_is_tried_again(tmp_path: Path, trouble: Any) -> None:
    server = _Server(lambda number: trouble if number < 2 else _named(_file(tmp_path / "a.safetensors")))
    _fetch(tmp_path, server)
    assert server.count == 3


def test_attempts_are_bounded_and_the_last_reason_is_told(tmp_path: Path) -> None:
    server = _Server(lambda number: httpx.Response(500, text="broken engine"))
    with pytest.raises(ServerStalled, match=r"failed 5 times.*broken engine"):
        _fetch(tmp_path, server)
    assert server.count == 5


def test_a_dead_server_is_not_asked_again(tmp_path: Path) -> None:
    def dead() -> None:
        raise ServerDied("ended with signal 11")

    server = _Server(lambda number: httpx.ConnectError("refused"))
    with pytest.raises(ServerDied, match="signal 11"):
        _fetch(tmp_path, server, dead)
    assert server.count == 1


def test_a_400_is_never_tried_again(tmp_path: Path) -> None:
    server = _Server(lambda number: httpx.Response(400, text="too long"))
    with pytest.raises(SampleRefusedError, match="too long"):
        _fetch(tmp_path, server)
    assert server.count == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(404, text="no such model"), "404"),
        (httpx.Response(200, json={"choices": []}), "without the hidden-states connector"),
        (httpx.Response(200, json={"kv_transfer_params": None}), "without the hidden-states connector"),
        (_named(Path("/somewhere/else.safetensors")), "writes to /somewhere"),
    ],
)
def test_a_server_that_is_not_ours_is_refused_at_once(
    tmp_path: Path, answer: httpx.Response, said: str
) -> None:
    server = _Server(lambda number: answer)
    with pytest.raises(ServerRefused, match=said):
        _fetch(tmp_path, server)
    assert server.count == 1


def test_a_file_that_never_comes_or_is_torn_is_asked_for_again(tmp_path: Path) -> None:
    def answer(number: int) -> httpx.Response:
        path = tmp_path / f"{number}.safetensors"
        if number == 1:
            path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
        if number == 2:
            path.with_name(path.name + ".failed").write_text("OSError: odd")
        return _named(_file(path)) if number == 3 else _named(path)

    server = _Server(answer)
    _fetch(tmp_path, server, file_timeout_s=0.02)
    assert server.count == 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["", ".failed", ".no-room"])
def test_a_file_that_comes_when_nobody_waits_for_it_any_more_is_deleted(tmp_path: Path, suffix: str) -> None:
    late = tmp_path / "0.safetensors"

    def answer(number: int) -> httpx.Response:
        if number == 0:
            return _named(late)
        _file(late).rename(late.with_name(late.name + suffix))
        return _named(_file(tmp_path / "1.safetensors"))

    async def fetch() -> list[Path]:
        transport = httpx.MockTransport(_Server(answer))
        arguments = ("http://x", "m", tmp_path, 4, lambda: None)
        async with Capture(*arguments, transport=transport, first_wait_s=0.0, file_timeout_s=0.02) as capture:
            await capture.fetch(IDS)
            return list(tmp_path.iterdir())

    assert asyncio.run(fetch()) == []


def test_a_file_that_comes_after_the_last_request_is_deleted_at_the_end(tmp_path: Path) -> None:
    late = tmp_path / "0.safetensors"

    async def fetch() -> None:
        server = _Server(lambda number: _named(late if number == 0 else _file(tmp_path / "1.safetensors")))
        transport = httpx.MockTransport(server)
        arguments = ("http://x", "m", tmp_path, 4, lambda: None)
        async with Capture(*arguments, transport=transport, first_wait_s=0.0, file_timeout_s=0.02) as capture:
            await capture.fetch(IDS)
            _file(late)

    asyncio.run(fetch())
    assert not list(tmp_path.iterdir())


def test_a_full_staging_disk_stops_the_work(tmp_path: Path) -> None:
    def full(number: int) -> httpx.Response:
        (tmp_path / "a.safetensors.no-room").touch()
        return _named(tmp_path / "a.safetensors")

    with pytest.raises(NotEnoughRoom, match="is full"):
        _fetch(tmp_path, _Server(full))
    assert not list(tmp_path.iterdir())


def test_a_sample_that_wants_to_be_alone_is_next_and_alone(tmp_path: Path) -> None:
    now: list[int] = []
    seen: list[tuple[int, int]] = []

    async def serve(request: httpx.Request) -> httpx.Response:
        (first, *_) = json.loads(request.content)["prompt"]
        now.append(first)
        for _ in range(20):
            await asyncio.sleep(0)
        seen.append((first, len(now)))
        now.remove(first)
        return _named(_file(tmp_path / f"{first}.safetensors"))

    async def fetch_all() -> None:
        transport = httpx.MockTransport(serve)
        async with Capture("http://x", "m", tmp_path, 4, lambda: None, transport=transport) as capture:
            others = [asyncio.create_task(capture.fetch([number, 0])) for number in range(40)]
            for _ in range(10):
                await asyncio.sleep(0)
            await asyncio.gather(*others, *(capture.fetch([number, 0], alone=True) for number in (100, 101)))

    asyncio.run(fetch_all())
    order = [first for first, _ in seen]
    assert sorted(order) == [*range(40), 100, 101]
    assert {company for first, company in seen if first >= 100} == {1}
    assert max(company for _, company in seen) == 4
    assert max(order.index(100), order.index(101)) < 12  # not behind the forty that wait


def test_a_cancelled_wait_for_being_alone_lets_the_others_on(tmp_path: Path) -> None:
    async def serve(request: httpx.Request) -> httpx.Response:
        (first, *_) = json.loads(request.content)["prompt"]
        await asyncio.sleep(0.01)
        return _named(_file(tmp_path / f"{first}.safetensors"))

    async def fetch_all() -> int:
        transport = httpx.MockTransport(serve)
        async with Capture("http://x", "m", tmp_path, 2, lambda: None, transport=transport) as capture:
            others = [asyncio.create_task(capture.fetch([number, 0])) for number in range(6)]
            alone = asyncio.create_task(capture.fetch([100, 0], alone=True))
            await asyncio.sleep(0.005)
            alone.cancel()
            return len(await asyncio.gather(*others))

    assert asyncio.run(fetch_all()) == 6
