"""A small job without a model: target and prompts made by hand, and a client that answers by itself."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter

from eagle3_pipeline.generation.begin_token import BeginToken
from eagle3_pipeline.generation.breaker import Breaker
from eagle3_pipeline.generation.collection import open_shard
from eagle3_pipeline.generation.first_replies import FirstReplies
from eagle3_pipeline.generation.job import Job
from eagle3_pipeline.generation.progress import Pulse
from eagle3_pipeline.generation.reply import Reply, RequestRefused
from eagle3_pipeline.generation.shard_generation import ShardGeneration
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.prompts.selection import digests_of_shards
from eagle3_pipeline.recipe import Recipe
from tests.recipes import NOTHING_ON_ITS_WAY

Message = dict[str, str]


def make_recipe(tmp_path: Path, count: int, per_shard: int, **sections: Any) -> Recipe:
    """A recipe of `count` prompts; `sections` replace whole sections."""
    source = tmp_path / "source.jsonl"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("{}\n")
    (tmp_path / "model").mkdir(exist_ok=True)
    return Recipe.model_validate(
        {
            "name": "small",
            "target": {"path": str(tmp_path / "model")},
            "prompts": {"sources": [{"path": str(source)}], "count": count, "per_shard": per_shard},
            "generation": {"concurrency": 4, "max_completion_tokens": 64, "request_timeout_s": 30},
            "extraction": {"layers": [1, 2, 3, 4], **NOTHING_ON_ITS_WAY},
            "evaluation": {"sets": [{"name": "source", "path": str(source)}]},
            **sections,
        }
    )


def make_lineage(
    tmp_path: Path,
    turns: Sequence[int],
    per_shard: int,
    system: str | None = None,
    judges: int = 0,
    **sections: Any,
) -> Lineage:
    """A lineage whose prompt k, called `pk`, has turns[k] user turns `pk.0`, `pk.1` and so on.

    The first `judges` of them judge the draft.
    """
    lineage = Lineage(make_recipe(tmp_path, len(turns), per_shard, **sections), tmp_path / "storage")
    target = lineage.target_model()
    if target.manifest() is None:
        target.folder.mkdir(parents=True)
        facts = {"model_path": str(tmp_path / "model"), "model_fingerprint": "target", "hidden_size": 8}
        target.finish([], facts)
    prompts = [
        Prompt(f"p{number}", tuple(f"p{number}.{turn}" for turn in range(count)), system, "test")
        for number, count in enumerate(turns)
    ]
    place = lineage.prompts()
    place.folder.mkdir(parents=True, exist_ok=True)
    path = place.folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt.to_json()) + "\n" for prompt in prompts))
    shards = digests_of_shards(prompts, lineage.recipe.prompts)
    validation = [prompt.prompt_id for prompt in prompts[:judges]]
    place.finish([path], {"count": len(prompts), "validation": validation, "shards": shards})
    return lineage


def asked_id(messages: list[Message]) -> str:
    """The sample id that a request is for: `p3.1` is asked as turn 1 of prompt p3."""
    prompt, turn = messages[-1]["content"].split(".")
    return f"{prompt}-t{turn}"


def reply_to(messages: list[Message], kind: str = "good") -> Reply:
    """A reply of a kind: good, truncated, empty, degenerate or thinking."""
    words = messages[-1]["content"]
    prompt_ids = [len(message["content"]) for message in messages]
    if kind == "empty":
        return Reply(prompt_ids, [2], "stop", "", "")
    if kind == "degenerate":
        return Reply(prompt_ids, [7] * 64, "length", "items " * 64, "")
    if kind == "thinking":
        return Reply(prompt_ids, [3, 4, 5], "length", "", "hmm")
    return Reply(
        prompt_ids, [3, 4, 5, 2], "length" if kind == "truncated" else "stop", f"answer to {words}", ""
    )


class Answers:
    """A client that answers by `kinds` (sample id -> kind), after giving way to others `delays` times."""

    def __init__(
        self,
        kinds: dict[str, str] | None = None,
        delays: dict[str, int] | None = None,
        before: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.kinds = kinds or {}
        self.delays = delays or {}
        self.before = before
        self.asked: list[str] = []
        self.asked_greedily: list[str] = []
        self.conversations: dict[str, list[Message]] = {}
        self.is_well = True
        self.running = 0
        self.fewest_running: list[int] = []

    def sampling(self, *, greedy: bool = False) -> dict[str, Any]:
        return {"temperature": 0.0 if greedy else 0.7}

    async def answers(self) -> bool:
        return self.is_well

    async def ask(self, messages: list[Message], *, greedy: bool = False) -> Reply:
        name = asked_id(messages)
        if greedy:
            self.asked_greedily.append(name)
        self.asked.append(name)
        self.conversations[name] = messages
        self.running += 1
        try:
            for _ in range(self.delays.get(name, 1)):
                await asyncio.sleep(0)
            self.fewest_running.append(self.running)
            self.before(name)
        finally:
            self.running -= 1
        if self.kinds.get(name) == "refused":
            raise RequestRefused("too long")
        return reply_to(messages, self.kinds.get(name, "good"))


def run_job(
    lineage: Lineage,
    client: Answers,
    shards: Sequence[str] | None = None,
    check_alive: Callable[[], object] = lambda: None,
    parser: str | None = None,
    slots: int | None = None,
) -> list[str]:
    """Collect with a client instead of a server; returns the shards that were finished, in order."""
    finished: list[str] = []
    in_flight = slots or lineage.recipe.generation.most_in_flight
    opened = [open_shard(lineage, shard) for shard in shards or lineage.recipe.shards]
    works = [work for work in opened if isinstance(work, ShardGeneration)]
    left = sum(one.turns_left for work in works for one in work.conversations)

    def on_shard(shard: str, manifest: Manifest) -> None:
        finished.append(shard)

    async def run() -> None:
        job = Job(
            works,
            Pulse(left, 0, longest=64),
            Breaker(check_alive),
            slots=CapacityLimiter(in_flight),
            workers=in_flight,
            server="server",
            begin_token=BeginToken(None, False),
            first_replies=FirstReplies(parser, in_flight),
            on_shard=on_shard,
        )
        await job.run(client)

    try:
        for work in [work for work in works if work.is_complete]:
            work.finish()
            finished.append(work.name)
        works = [work for work in works if work.name not in finished]
        if works:
            asyncio.run(run())
    finally:
        for work in works:
            work.close()
    return finished
