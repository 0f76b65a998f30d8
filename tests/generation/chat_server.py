"""A server of chat completions on a real socket, in a thread: what only sockets do, and no model."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.generation.world import asked_id


@dataclass
class ChatServer:
    """What a running server looks like. Where `behave(handler, body)` returns true, it has answered."""

    base_url: str = ""
    model: str = "eagle3-test"
    fingerprint: str = "server-fingerprint"
    asked: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    behave: Callable[[BaseHTTPRequestHandler, dict[str, Any]], bool] = lambda handler, body: False
    death: Exception | None = None
    opened: int = 0

    @contextmanager
    def open(self) -> Iterator["ChatServer"]:
        """What a step is given; entering it is counted, and a server that died lives again."""
        self.opened += 1
        self.death = None
        yield self

    @property
    def spec(self) -> "ChatServer":
        """The specification, of which only the fingerprint is asked."""
        return self

    def check_alive(self) -> None:
        """Raise what the test says the server died of."""
        if self.death is not None:
            raise self.death


def chat_body(text: str = "fine") -> dict[str, Any]:
    """A reply in vLLM's shape."""
    message = {"role": "assistant", "content": text, "reasoning": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [11, 12, 2]}
    return {"id": "x", "choices": [choice], "prompt_token_ids": [1, 5, 6], "usage": {}}


@contextmanager
def serve_chat() -> Iterator[ChatServer]:
    """A server that answers everything with `chat_body`, until told otherwise."""
    state = ChatServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.bodies.append(body)
            if "messages" in body:
                state.asked.append(asked_id(body["messages"]))
            if not state.behave(self, body):
                self.answer(200, chat_body())

        def handle(self) -> None:
            with suppress(ConnectionError):  # the client went away, as a cancelled one does
                super().handle()

        def answer(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.base_url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
