"""Connections to a server on this machine, for many requests at once: a pool for each connection.

One pool of httpcore's looks through all its connections when a request comes and when it goes: with 200 in
one, 15 of 17 ms of CPU for each reply. And a request that is cancelled there while it closes others'
connections leaves them open.
"""

from contextlib import aclosing
from typing import Any

import httpx

# uvicorn closes a connection that idled for 5 s; reusing one at that moment fails.
_KEEPALIVE_S = 3.0


class Connections:
    """As many connections as there were requests at once; whoever makes one closes it with `aclose`."""

    def __init__(self, base_url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` takes the place of all connections."""
        self._base_url = httpx.URL(base_url)
        self._transport = transport
        self._all: list[httpx.AsyncBaseTransport] = []
        self._idle: list[httpx.AsyncBaseTransport] = []

    async def post(self, path: str, body: dict[str, Any], timeout: httpx.Timeout) -> httpx.Response:
        """The whole reply to a JSON body; raises httpx.TransportError."""
        connection = self._idle.pop() if self._idle else self._connection()
        url = self._base_url.join(path)
        request = httpx.Request("POST", url, json=body, extensions={"timeout": timeout.as_dict()})
        try:
            response = await connection.handle_async_request(request)
            response.request = request
            async with aclosing(response):
                await response.aread()
            return response
        finally:
            self._idle.append(connection)

    async def aclose(self) -> None:
        """Close all connections."""
        for connection in self._all:
            await connection.aclose()

    def _connection(self) -> httpx.AsyncBaseTransport:
        """One more connection; it is opened by its first request, and again where it was closed."""
        limits = httpx.Limits(max_connections=1, keepalive_expiry=_KEEPALIVE_S)
        # The server is on this machine: it speaks plain HTTP, and a proxy in the environment is not meant.
        connection = self._transport or httpx.AsyncHTTPTransport(verify=False, trust_env=False, limits=limits)
        self._all.append(connection)
        return connection
