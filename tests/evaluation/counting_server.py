"""A small HTTP server that answers chats and counts drafts as vLLM does, with two engines and a /metrics."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import ServerDied

ENGINES = 2
ACCEPTED = (3, 1, 0, 2)
"""Accepted tokens of one draft after the other, over and over, as far as so many are proposed."""
MOST_PROPOSED = 8


@dataclass
class Counters:
    """What one engine has counted since the server's start."""

    generated: int = 0
    drafts: int = 0
    accepted: int = 0
    positions: list[int] = field(default_factory=lambda: [0] * MOST_PROPOSED)


@dataclass
class CountingServer:
    """The part of a RunningServer that a measurement uses, and the knobs of the stand-in behind it."""

    base_url: str = ""
    model: str = "eagle3-0123456789ab"
    log: Path = Path("server.log")
    drafts: bool = True
    speculative_tokens: int = 3
    salt: str = ""
    """Other replies than the server of another salt gives."""
    hidden_engine: bool = False
    """Leave one engine out of the positions, as a sum over too few series would."""
    foreign_tokens: int = 0
    """Tokens that somebody else generates during each request."""
    status: int = 200
    hang_up: bool = False
    """Close the connection instead of replying."""
    dead: bool = False
    delay_s: float = 0.0
    late_counting: bool = False
    """Count a reply only after it was sent, as vLLM does with its last step."""
    counting: bool = True
    """Whether anything is counted at all."""
    longest_prompt: int = 1000
    """Prompts of more token ids are refused."""
    likeliest: Callable[[list[int]], dict[int, float]] | None = None
    """Log-probabilities of the tokens after a prompt of token ids, the likeliest first, for those who ask."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    most_in_flight: int = 0
    engines: list[Counters] = field(default_factory=lambda: [Counters() for _ in range(ENGINES)])
    _in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check_alive(self) -> None:
        """Raise ServerDied where the test says so."""
        if self.dead:
            raise ServerDied("the server's process ended: out of memory")

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any], int]:
        """Status and reply to a chat or to a prompt of token ids, and the number of its tokens."""
        with self._lock:
            self.requests.append(body)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        time.sleep(self.delay_s)
        with self._lock:
            self._in_flight -= 1
        if self.status != 200:
            return self.status, {"error": {"message": "no"}}, 0
        if "tokens" in body:
            return 200, {"prompt": " ".join(f"t{token}" for token in body["tokens"])}, 0
        if "messages" in body:
            text = body["messages"][-1]["content"]
            is_too_long, first = "too long" in text, sum(map(ord, self.salt + text))
            prompt = list(map(ord, text))
        else:
            prompt = body["prompt"]
            is_too_long, first = len(prompt) > self.longest_prompt, sum(prompt)
        if is_too_long:
            return 400, {"error": {"message": "maximum context length"}}, 0
        ids = [first + k for k in range(body["max_tokens"])]
        choice = {"token_ids": ids, "finish_reason": "length", "prompt_token_ids": prompt}
        if "logprobs" in body and self.likeliest is not None:
            choice["logprobs"] = logprobs_of(self.likeliest(prompt))
        return 200, {"choices": [choice]}, len(ids)

    def count(self, tokens: int) -> None:
        """Count one reply on the engine whose turn it is: a token from the prompt, 1 + n for each draft."""
        if not self.counting:
            return
        with self._lock:
            engine = self.engines[len(self.requests) % ENGINES]
            engine.generated += tokens + self.foreign_tokens
            left = tokens - 1
            while self.drafts and left > 0:
                accepted = min(ACCEPTED[engine.drafts % len(ACCEPTED)], self.speculative_tokens, left - 1)
                engine.drafts += 1
                engine.accepted += accepted
                for position in range(accepted):
                    engine.positions[position] += 1
                left -= 1 + accepted

    def metrics(self) -> str:
        """The counters in the Prometheus text format, one series for each engine."""
        lines = []

        def family(name: str, kind: str, series: list[tuple[str, float]]) -> None:
            lines.append(f"# TYPE {name} {kind}")
            lines.extend(f'{name}{{model_name="m",{labels}}} {value}' for labels, value in series)

        def per_engine(name: str, values: list[int], kind: str = "counter") -> None:
            series = [(f'engine="{number}"', float(value)) for number, value in enumerate(values)]
            family(f"vllm:{name}", kind, series)

        with self._lock:
            per_engine("num_requests_running", [self._in_flight, 0], "gauge")
            per_engine("num_requests_waiting", [0, 0], "gauge")
            per_engine("generation_tokens_total", [engine.generated for engine in self.engines])
            if self.drafts:
                drafts = [engine.drafts for engine in self.engines]
                per_engine("spec_decode_num_drafts_total", drafts)
                per_engine(
                    "spec_decode_num_draft_tokens_total", [n * self.speculative_tokens for n in drafts]
                )
                per_engine("spec_decode_num_accepted_tokens_total", [one.accepted for one in self.engines])
                series = [
                    (f'engine="{number}",position="{position}"', float(engine.positions[position]))
                    for number, engine in enumerate(self.engines[: 1 if self.hidden_engine else ENGINES])
                    for position in range(self.speculative_tokens)
                ]
                family("vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter", series)
        return "\n".join(lines) + "\n"


def logprobs_of(likeliest: dict[int, float]) -> dict[str, Any]:
    """vLLM's `logprobs` of a completion of one token, where tokens are given as ids."""
    named = {f"token_id:{token}": value for token, value in likeliest.items()}
    token, value = next(iter(named.items()))
    return {"text_offset": [0], "token_logprobs": [value], "tokens": [token], "top_logprobs": [named]}


@contextmanager
def counting_server(**knobs: Any) -> Iterator[CountingServer]:
    """Serve on a free port of the loopback until left."""
    server = CountingServer(**knobs)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one piece: of two, the second waits for the first one's receipt

        def do_GET(self) -> None:
            self._send(200, server.metrics().encode(), "text/plain; version=0.0.4")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply, tokens = server.answer(body)
            if server.hang_up:
                self.close_connection = True
                return
            if not server.late_counting:
                server.count(tokens)
            self._send(status, json.dumps(reply).encode(), "application/json")
            if server.late_counting:
                time.sleep(0.03)
                server.count(tokens)

        def _send(self, status: int, payload: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)
            self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64  # of more connections at once than wait here, some try again a second later

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that gives up leaves a broken pipe, which is no news."""

    listener = Listener(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    server.base_url = f"http://127.0.0.1:{listener.server_port}"
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
