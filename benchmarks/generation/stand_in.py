"""A server under a long-tailed load: vLLM's HTTP protocol, no model, and so little CPU that clients show.

    python -m benchmarks.generation.stand_in EVENTS --ms-per-token 2

Prints its port. A reply of n tokens comes n x 2 ms after its question, however many others are at work; n is
log-normal (median 400, sigma 1) and follows, as every id, from the prompt alone. Bodies are the recorded ones
of the real server (tests/fakes/recorded) with this server's values put in.

EVENTS gets one record of 16 bytes (`EVENT`) per question and per reply, at once, so that it is whole after
any kill. Questions that begin `No. 17: ` are number 17 there.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import struct
import time
import zlib
from pathlib import Path
from typing import Any

_RECORDED = Path(__file__).parents[2] / "tests" / "fakes" / "recorded"

MODEL = "stand-in"
EVENT = [("time", "<f8"), ("number", "<i4"), ("tokens", "<i4")]
"""numpy's type of a record: the monotonic clock, and as `tokens` ASKED, DROPPED or those of the reply."""
ASKED, DROPPED = 0, -1

_MEDIAN_TOKENS, _SIGMA = 400, 1.0
_FEWEST_TOKENS = 8
_VOCABULARY = range(1000, 49_000)
_END_OF_TURN = 2
_LONGEST = 16_384
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 %d %s\r\nserver: uvicorn\r\ncontent-length: %d\r\ncontent-type: %s\r\n\r\n"
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found"}


def tokens_of(text: str, limit: int) -> int:
    """Length of the reply to a prompt, `limit` at most."""
    length = random.Random(zlib.crc32(text.encode())).lognormvariate(math.log(_MEDIAN_TOKENS), _SIGMA)
    return min(limit, max(_FEWEST_TOKENS, round(length)))


class Texts:
    """Token ids and words, rendered once; a reply is a slice of each."""

    def __init__(self) -> None:
        chance = random.Random(0)
        ids = [b"%d" % chance.choice(_VOCABULARY) for _ in range(2 * _LONGEST)]
        self._ids = b",".join(ids)
        self._starts = [0]
        for one in ids:
            self._starts.append(self._starts[-1] + len(one) + 1)
        letters = "etaoinshrdlu"
        words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(_LONGEST * 2)]
        self._words = " ".join(words).encode()

    def ids(self, seed: int, count: int) -> bytes:
        """`count` ids with commas between them."""
        first = seed % _LONGEST
        return self._ids[self._starts[first] : self._starts[first + count] - 1]

    def words(self, seed: int, count: int) -> bytes:
        """The text of so many tokens: four characters each, as in English."""
        first = seed % _LONGEST
        return self._words[first : first + 4 * count]


def _template(name: str, changes: dict[str, str]) -> bytes:
    """A recorded body as compact JSON, with `%(name)b` for each of `changes` (dotted path -> name)."""
    body = json.loads((_RECORDED / "generation.json").read_text())[name]["body"]
    for path, value in changes.items():
        *parents, last = path.split(".")
        place: Any = body
        for parent in parents:
            place = place[int(parent)] if parent.isdigit() else place[parent]
        place[last] = f"@{value}@"
    text = json.dumps(body, separators=(",", ":")).replace("%", "%%")
    return re.sub(r'"@(\w+)@"', r"%(\1)b", text).encode()


_REPLY = {
    "id": "id",
    "created": "created",
    "model": "model",
    "choices.0.message.content": "content",
    "choices.0.message.reasoning": "reasoning",
    "choices.0.token_ids": "ids",
    "choices.0.finish_reason": "finish",
    "usage.prompt_tokens": "prompt_tokens",
    "usage.completion_tokens": "tokens",
    "usage.total_tokens": "total",
    "prompt_token_ids": "prompt_ids",
}


class StandIn:
    """The state of the server, and its answers."""

    def __init__(self, events: Path, ms_per_token: float) -> None:
        self._events = os.open(events, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        self._token_s = ms_per_token / 1000
        self._texts = Texts()
        self._reply = _template("chat_stop", _REPLY)
        self._models = _template("models", {"data.0.id": "model", "data.0.max_model_len": "longest"})
        self._metrics = (_RECORDED / "metrics_fresh.txt").read_text()
        self._working: dict[asyncio.TimerHandle, float] = {}
        self._tokens = self._prompt_tokens = 0

    def log(self, number: int, tokens: int) -> None:
        """Write one event."""
        os.write(self._events, struct.pack("<dii", time.monotonic(), number, tokens))

    def get(self, path: bytes) -> bytes:
        """The answer to a GET."""
        if path == b"/health":
            return _response(200, b"")
        if path == b"/version":
            return _response(200, b'{"version":"0.32.0"}')
        if path == b"/v1/models":
            values = {b"model": json.dumps(MODEL).encode(), b"longest": b"%d" % _LONGEST}
            return _response(200, self._models % values)
        if path == b"/metrics":
            return _response(200, self._counters().encode(), b"text/plain; version=1.0.0; charset=utf-8")
        return _response(404, b'{"detail":"Not Found"}')

    def chat(self, data: bytes, connection: "Connection") -> None:
        """Answer a question on its connection when its time has come."""
        body = json.loads(data)
        text = body["messages"][-1]["content"]
        seed = zlib.crc32(text.encode())
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or _LONGEST
        count = tokens_of(text, limit)
        number = int(text[4 : text.index(":")]) if text.startswith("No. ") else -1
        self.log(number, ASKED)
        loop = asyncio.get_running_loop()

        def reply() -> None:
            del self._working[timer]
            self._tokens += count
            self._prompt_tokens += len(text) // 5
            connection.answer(_response(200, self._body(text, seed, count, count == limit)))
            self.log(number, count)

        def drop() -> None:
            timer.cancel()
            del self._working[timer]
            self.log(number, DROPPED)

        timer = loop.call_later(count * self._token_s, reply)
        self._working[timer] = loop.time()
        connection.on_lost = drop

    def _body(self, text: str, seed: int, count: int, truncated: bool) -> bytes:
        prompt_tokens = len(text) // 5
        ids = self._texts.ids(seed, count) if truncated else self._texts.ids(seed, count - 1)
        values = {
            b"id": b'"chatcmpl-%016x"' % seed,
            b"created": b"%d" % time.time(),
            b"model": json.dumps(MODEL).encode(),
            b"content": b'"%b"' % self._texts.words(seed, count),
            b"reasoning": b"null",
            b"ids": b"[%b]" % ids if truncated else b"[%b,%d]" % (ids, _END_OF_TURN),
            b"finish": b'"length"' if truncated else b'"stop"',
            b"prompt_tokens": b"%d" % prompt_tokens,
            b"tokens": b"%d" % count,
            b"total": b"%d" % (prompt_tokens + count),
            b"prompt_ids": b"[%b]" % self._texts.ids(seed // 7, prompt_tokens),
        }
        return self._reply % values

    def _counters(self) -> str:
        now = asyncio.get_running_loop().time()
        begun = sum(int((now - start) / self._token_s) for start in self._working.values())
        values = {
            "num_requests_running": len(self._working),
            "kv_cache_usage_perc": min(1.0, begun / 2_000_000),
            "generation_tokens_total": self._tokens + begun,
            "prompt_tokens_total": self._prompt_tokens,
        }
        text = self._metrics
        for name, value in values.items():
            text = re.sub(rf"^(vllm:{name}\{{.*\}}) .*$", rf"\g<1> {value}", text, flags=re.MULTILINE)
        return text


class Connection(asyncio.Protocol):
    """One kept-alive connection: a request, its answer, the next request."""

    def __init__(self, server: StandIn) -> None:
        self._server = server
        self._received = b""
        self.on_lost = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        found = _CONTENT_LENGTH.search(head)
        length = int(found[1]) if found else 0
        if not end or len(rest) < length:
            return
        self._received = rest[length:]
        method, path, _ = head.split(b" ", 2)
        if method == b"POST" and path == b"/v1/chat/completions":
            self._server.chat(rest[:length], self)
        else:
            self.answer(self._server.get(path))

    def answer(self, response: bytes) -> None:
        """Send a response; nothing is at work on this connection any more."""
        self.on_lost = lambda: None
        self._transport.write(response)

    def connection_lost(self, error: Exception | None) -> None:
        self.on_lost()


def _response(status: int, body: bytes, kind: bytes = b"application/json") -> bytes:
    return _HEAD % (status, _REASONS[status], len(body), kind) + body


async def _serve(events: Path, ms_per_token: float) -> None:
    stand_in = StandIn(events, ms_per_token)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(stand_in), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("events", type=Path)
    parser.add_argument("--ms-per-token", type=float, required=True)
    options = parser.parse_args()
    asyncio.run(_serve(options.events, options.ms_per_token))


if __name__ == "__main__":
    main()
