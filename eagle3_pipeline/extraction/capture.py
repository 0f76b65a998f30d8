"""Asking the extraction server for the hidden states of one sample, and fetching the file it names.

A request is one prefill: the sample's token ids as the prompt, one token to generate, greedily. The
reply names a file in the staging folder, which appears when it is complete, up to a step of the engine
later. Only until the reply does a sample count as one at the server: then the next one is sent.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import tenacity
import torch
from safetensors import SafetensorError, safe_open

from eagle3_pipeline.errors import ServerRefused, ServerStalled
from eagle3_pipeline.serving.connections import Connections
from eagle3_pipeline.staging import FAILED_SUFFIX, NO_ROOM_SUFFIX, WriteFailed, wait_for_file

_ATTEMPTS = 5
# All samples in flight may wait for each other's prefill: 32 x 4096 tokens at 500 tokens/s, doubled.
_TIMEOUT = httpx.Timeout(600.0, connect=10.0, write=60.0)
_FILE_TIMEOUT_S = 120.0  # from the reply to the complete file; the largest are a few hundred MB
_LONGEST_WAIT_S = 60.0  # however long the server asks us to stay away


@dataclass(frozen=True)
class Captured:
    """What the server computed: token_ids [tokens] and states [tokens, layers, hidden], on the CPU."""

    token_ids: torch.Tensor
    states: torch.Tensor


class SampleRefusedError(Exception):
    """The server answered 400: these token ids cannot be extracted, whoever asks again."""


class _TransientError(Exception):
    """Worth another attempt, after `retry_after_s` where the server says so."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Capture:
    """Captures samples, `in_flight` at the server at the same time. Use as an async context manager."""

    def __init__(
        self,
        base_url: str,
        model: str,
        staging: Path,
        in_flight: int,
        check_alive: Callable[[], Any],
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        first_wait_s: float = 0.5,
        file_timeout_s: float = _FILE_TIMEOUT_S,
    ) -> None:
        """`check_alive` raises ServerDied when the server's process is gone; asked before each retry."""
        self._model = model
        self._staging = staging
        self._check_alive = check_alive
        self._first_wait_s = first_wait_s
        self._file_timeout_s = file_timeout_s
        self._in_flight = in_flight
        # The semaphore, not the connections, is where samples wait: a time limit runs only once sent.
        self._free = asyncio.Semaphore(in_flight)
        self._only_one = asyncio.Lock()
        self._want_to_be_alone = 0
        self._held = 0
        """Places that whoever is alone holds, and leaves to the next one that wants to be."""
        self._nobody_alone = asyncio.Event()
        self._nobody_alone.set()
        self._late: set[Path] = set()
        """Files of requests that were given up: each may still come."""
        self._connections = Connections(base_url, transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._delete_late()
        await self._connections.aclose()

    async def fetch(self, token_ids: Sequence[int], *, alone: bool = False) -> Captured:
        """The hidden states of one sample; its file is gone from the staging folder afterwards.

        `alone` waits until no other sample is at the server and sends none until this one is computed.
        Raises SampleRefusedError (400), ServerRefused (it is no extraction server of ours), ServerDied,
        ServerStalled (alive, but still failing after several attempts), NotEnoughRoom.
        """
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_TransientError),
            stop=tenacity.stop_after_attempt(_ATTEMPTS),
            wait=self._wait,
            before_sleep=lambda _: self._check_alive(),
        )
        try:
            return await retrying(self._attempt, token_ids, alone)
        except tenacity.RetryError as error:
            self._check_alive()
            cause = error.last_attempt.exception()
            raise ServerStalled(
                f"the extraction server lives, but a sample of {len(token_ids)} tokens failed "
                f"{_ATTEMPTS} times, at last with: {cause}. See the server's log, then materialise "
                "hidden_state_shards again: finished parts are kept."
            ) from cause

    def _wait(self, state: tenacity.RetryCallState) -> float:
        """Seconds to the next attempt: what the server asks for (Retry-After), else doubling with jitter."""
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, _TransientError) and error.retry_after_s is not None:
            return min(error.retry_after_s, _LONGEST_WAIT_S)
        return self._first_wait_s * float(2 ** (state.attempt_number - 1)) * random.uniform(0.5, 1.5)

    async def _attempt(self, token_ids: Sequence[int], alone: bool) -> Captured:
        path = await self._compute(token_ids, alone)
        self._delete_late()
        try:
            await wait_for_file(path, self._file_timeout_s)
        except TimeoutError as error:
            self._late.add(path)
            raise _TransientError(str(error)) from error
        except WriteFailed as error:
            raise _TransientError(str(error)) from error
        return _load_and_delete(path)  # at once: the file is mapped, its states are read when they are used

    def _delete_late(self) -> None:
        """Delete what came after nobody waited for it any more, the marks of failed writes too."""
        for path in list(self._late):
            for suffix in ("", NO_ROOM_SUFFIX, FAILED_SUFFIX):
                with suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).unlink()
                    self._late.discard(path)

    async def _compute(self, token_ids: Sequence[int], alone: bool) -> Path:
        """Have the server compute a sample; the file to come."""
        body = {"model": self._model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0}
        try:
            async with self._alone() if alone else self._place():
                reply = await self._connections.post("/v1/completions", body, _TIMEOUT)
        except httpx.TransportError as error:
            raise _TransientError(f"{type(error).__name__}: {error}") from error
        self._judge(reply)
        return self._named_file(reply)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the places at the server, once nobody waits to be alone there."""
        while True:
            await self._nobody_alone.wait()
            async with self._free:
                if self._nobody_alone.is_set():
                    yield
                    return

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """All places at the server, before anybody else who waits for one; kept for others who want that."""
        self._want_to_be_alone += 1
        self._nobody_alone.clear()
        try:
            # Two that each hold a half of the places would wait for each other.
            async with self._only_one:
                while self._held < self._in_flight:
                    await self._free.acquire()
                    self._held += 1
                yield
        finally:
            self._want_to_be_alone -= 1
            if not self._want_to_be_alone:
                self._nobody_alone.set()
                for _ in range(self._held):
                    self._free.release()
                self._held = 0

    def _judge(self, reply: httpx.Response) -> None:
        if reply.status_code == HTTPStatus.OK:
            return
        said = f"HTTP {reply.status_code}: {reply.text[:300]}"
        if reply.status_code == HTTPStatus.BAD_REQUEST:
            raise SampleRefusedError(said)
        if (
            reply.status_code in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
            or reply.is_server_error
        ):
            asked = reply.headers.get("retry-after", "")
            raise _TransientError(said, float(asked) if asked.isdigit() else None)
        raise ServerRefused(f"the extraction server answers {said}. Is it the server of this recipe?")

    def _named_file(self, reply: httpx.Response) -> Path:
        try:
            path = Path(reply.json()["kv_transfer_params"]["hidden_states_path"])
        except (ValueError, KeyError, TypeError) as error:
            raise ServerRefused(
                "the server's reply names no kv_transfer_params.hidden_states_path "
                f"({reply.text[:200]}). It runs without the hidden-states connector: stop it, so that it is "
                "started with the right flags."
            ) from error
        if path.parent != self._staging and path.parent.resolve() != self._staging.resolve():
            raise ServerRefused(
                f"the extraction server writes to {path.parent}, expected {self._staging}. Stop it, so "
                "that it is started with the right flags."
            )
        return path


def _load_and_delete(path: Path) -> Captured:
    try:
        return load(path)
    except (OSError, SafetensorError) as error:
        raise _TransientError(f"{path} cannot be read: {error}") from error
    finally:
        path.unlink(missing_ok=True)


def load(path: Path) -> Captured:
    """Read one file of captured states into memory; raises OSError and SafetensorError."""
    with safe_open(path, framework="pt") as file:
        return Captured(file.get_tensor("token_ids"), file.get_tensor("hidden_states"))
