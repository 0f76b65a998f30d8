"""The job of one server's life: one queue of conversations over all shards, asked by many workers.

A worker waits for a slot, then takes the next conversation, whichever shard it is of, so that the
server stays full across the borders of shards. A slot is held for a whole conversation, and neither
connection nor clock of a request starts before it is there. The number of slots may change while the
job runs; there are as many workers as slots there may ever be.

Replies go to a writer, which appends them to the journals in batches of at most a fifth of a second,
and finishes a shard the moment its last reply is on the disk.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from anyio import CapacityLimiter

from eagle3_pipeline.background import all_or_none
from eagle3_pipeline.errors import RequestsTimedOut, ServerStalled
from eagle3_pipeline.generation.begin_token import BeginToken
from eagle3_pipeline.generation.breaker import Breaker
from eagle3_pipeline.generation.captured_states import CapturedStates
from eagle3_pipeline.generation.concurrency import Reading
from eagle3_pipeline.generation.conversation import Conversation
from eagle3_pipeline.generation.first_replies import FirstReplies
from eagle3_pipeline.generation.progress import Pulse
from eagle3_pipeline.generation.reply import Reply, RequestRefused, Unanswered
from eagle3_pipeline.generation.shard_generation import ShardGeneration
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.samples.sample import Sample

_logger = logging.getLogger(__name__)

# The longest that a reply waits for its fsync: what a kill can lose.
_BATCH_S = 0.2


class Asks(Protocol):
    """What the job needs of a client."""

    def sampling(self, *, greedy: bool = False) -> dict[str, Any]: ...

    async def ask(self, messages: list[dict[str, str]], *, greedy: bool = False) -> Reply: ...

    async def answers(self) -> bool: ...


class Job:
    """Makes all samples of `works`; `on_shard` is called in the job's thread as each shard is finished."""

    def __init__(
        self,
        works: list[ShardGeneration],
        pulse: Pulse,
        breaker: Breaker,
        *,
        slots: CapacityLimiter,
        workers: int,
        server: str,
        begin_token: BeginToken,
        first_replies: FirstReplies,
        on_shard: Callable[[str, Manifest], None],
        readings: Sequence[Reading] = (),
        states: CapturedStates | None = None,
    ) -> None:
        self._works = works
        self._pulse = pulse
        self._breaker = breaker
        self._slots = slots
        self._workers = workers
        self._readings = readings
        self._server = server
        self._begin_token = begin_token
        self._first_replies = first_replies
        self._on_shard = on_shard
        self._states = states
        for work in works:
            work.forget_unrecorded()
        pairs = [(work, one) for work in works for one in work.conversations if one.turns_left]
        # Last those that were out when an earlier server died: one of them may kill this one, too.
        self._queue = deque(sorted(pairs, key=lambda pair: pair[1].was_asked))
        self._shard_of = {
            name: work.name for work in works for one in work.conversations for name in one.sample_ids
        }
        self._to_write: list[Sample] = []
        self._news = asyncio.Event()
        self._closing = asyncio.Event()
        self._given_up: dict[str, Unanswered] = {}
        self._suspects: list[tuple[Conversation, Unanswered]] = []

    async def run(self, client: Asks) -> None:
        """Ask for all turns; raises ServerError and its kinds, BadInput and QualityError.

        However it ends, what was answered is in the journals, and nothing is marked as failed.
        """
        writer = asyncio.create_task(self._write())
        asking = asyncio.create_task(self._ask_all(client))
        try:
            await asyncio.wait([asking, writer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
            await _end_of(asking)
            self._to_write += self._first_replies.rest()
            self._closing.set()
            self._news.set()
            await _end_of(writer)
            writer.result()
        await asking
        if self._given_up:
            self._raise_given_up()

    def _raise_given_up(self) -> None:
        name, trouble = next(iter(self._given_up.items()))
        timed_out = all(one.reason == "timeout" for one in self._given_up.values())
        kind = RequestsTimedOut if timed_out else ServerStalled
        raise kind(
            f"{len(self._given_up)} requests got no reply (first {name}: {trouble}); all others are "
            "recorded. Start again to send just these. If they only take long, raise "
            "generation.request_timeout_s or lower generation.concurrency."
        )

    async def _ask_all(self, client: Asks) -> None:
        await all_or_none(self._work(client) for _ in range(self._workers))
        self._convict(client)

    async def _work(self, client: Asks) -> None:
        while True:
            async with self._slots:
                if not self._queue:
                    return
                work, conversation = self._queue.popleft()
                conversation.was_asked = True
                work.started_at = work.started_at or time.monotonic()
                await self._converse(client, conversation)

    async def _converse(self, client: Asks, conversation: Conversation) -> None:
        while conversation.turns_left:
            name = conversation.next_id
            self._pulse.sent(name)
            try:
                sample = await self._ask(client, conversation)
            finally:
                self._pulse.returned(name)
            if sample is None:
                return
            self._accept(sample, conversation)

    async def _ask(self, client: Asks, conversation: Conversation) -> Sample | None:
        """The next sample of a conversation, or None when its request was given up for this call."""
        name, greedy = conversation.next_id, conversation.is_greedy
        sampling = client.sampling(greedy=greedy)
        try:
            reply = await client.ask(conversation.messages(), greedy=greedy)
        except RequestRefused as refusal:
            self._breaker.replied()
            _logger.warning(f"{name} is refused by the server: {refusal}")
            return conversation.add_refusal(str(refusal), sampling, self._server)
        except Unanswered as trouble:
            if trouble.may_be_the_prompt and await client.answers():
                self._suspects.append((conversation, trouble))
            else:
                self._given_up[name] = trouble
            self._breaker.gave_up(trouble.reason)
            return None
        self._breaker.replied()
        self._convict(client)
        self._begin_token.check(reply.prompt_token_ids, name)
        if self._states is not None:
            self._states.expect(name, reply.states_file)
        return conversation.add_reply(reply, sampling, self._server)

    def _convict(self, client: Asks) -> None:
        """Refuse the prompts at which the server fails each time, once it has answered another one."""
        suspects, self._suspects = self._suspects, []
        for conversation, trouble in suspects:
            _logger.warning(
                f"{conversation.next_id} fails every time, and the server answers others: {trouble}"
            )
            sampling = client.sampling(greedy=conversation.is_greedy)
            self._accept(conversation.add_refusal(str(trouble), sampling, self._server), conversation)

    def _accept(self, sample: Sample, conversation: Conversation) -> None:
        self._pulse.replied(sample)
        if conversation.ended_early:
            self._pulse.dropped(len(conversation.prompt.turns) - len(conversation.samples))
        self._to_write += self._first_replies.admit(sample)
        self._news.set()

    async def _write(self) -> None:
        while not self._closing.is_set() or self._to_write:
            await self._news.wait()
            if not self._closing.is_set():
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _BATCH_S)
            batch, self._to_write = self._to_write, []
            by_shard: dict[str, list[Sample]] = defaultdict(list)
            for sample in batch:
                by_shard[self._shard_of[sample.sample_id]].append(sample)
            if self._states is not None:
                await self._states.keep(by_shard)
            for work in self._works:
                if work.name in by_shard:
                    await self._record(work, by_shard[work.name])

    async def _record(self, work: ShardGeneration, samples: list[Sample]) -> None:
        await asyncio.to_thread(work.record, samples)
        if work.is_complete:
            manifest = await asyncio.to_thread(work.finish, self._readings)
            self._on_shard(work.name, manifest)


async def _end_of(task: "asyncio.Task[None]") -> None:
    """Wait for the end of a task, also when this one is cancelled meanwhile: what was answered is written."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
