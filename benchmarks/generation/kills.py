"""Collecting on a server that is killed again and again, and whether anything was lost, or made twice."""

import random
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.generation.events import answered, asked, read_events
from benchmarks.generation.load import Load, Running, invented, serving
from benchmarks.generation.stand_in import Texts
from eagle3_pipeline.errors import ServerDied
from eagle3_pipeline.generation.collection import collect_samples
from eagle3_pipeline.generation.shard_generation import JOURNAL_NAME
from eagle3_pipeline.journal import read_journal
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, read_samples

_LOOK_S = 0.02


class MortalServer:
    """A stand-in that is killed (SIGKILL) when it has sent so many replies as `deaths` says, over all lives.

    `known[k]` are the numbers of the prompts whose samples were on the disk when life k began, and
    `events(k)` is what that life saw. `kills` counts the kills so far, and `deaths` the lives that ended of
    them: a kill that comes after the last reply ends none.
    """

    def __init__(self, lineage: Lineage, folder: Path, ms_per_token: float, deaths: Sequence[int]) -> None:
        self.known: list[set[int]] = []
        self.kills = self.deaths = 0
        self._lineage = lineage
        self._folder = folder
        self._ms_per_token = ms_per_token
        self._due = sorted(deaths)

    def events(self, life: int) -> Any:
        """The events of one life."""
        return read_events(self._folder / f"events-{life}.bin")

    @contextmanager
    def open(self) -> Iterator[Running]:
        """One more life."""
        before = sum(answered(self.events(life)).total() for life in range(len(self.known)))
        self.known.append(recorded(self._lineage))
        life = len(self.known) - 1
        over = threading.Event()
        with serving(self._folder / f"events-{life}.bin", self._ms_per_token) as running:
            killer = threading.Thread(target=self._kill, args=(running, life, before, over))
            killer.start()
            try:
                yield running
            except ServerDied:
                self.deaths += 1
                raise
            finally:
                over.set()
                killer.join()

    def _kill(self, running: Running, life: int, before: int, over: threading.Event) -> None:
        while self._due and not over.wait(_LOOK_S):
            if before + answered(self.events(life)).total() >= self._due[0]:
                del self._due[0]
                assert running.process is not None
                self.kills += 1
                running.process.kill()
                return


def recorded(lineage: Lineage) -> set[int]:
    """Numbers of the prompts whose samples are on the disk, in a journal or a finished shard."""
    found = set()
    for shard in lineage.recipe.shards:
        place = lineage.synthetic_samples(shard)
        if place.manifest() is not None:
            found |= {int(sample.prompt_id) for sample in read_samples(place.folder / SAMPLES_NAME)}
        elif (journal := place.folder / JOURNAL_NAME).exists():
            found |= {int(record["prompt_id"]) for record in read_journal(journal)}
    return found


def survive(lineage: Lineage, folder: Path, load: Load, kills: int) -> dict[str, Any]:
    """Collect all samples through so many kills; raises AssertionError when something is lost or doubled."""
    chance = random.Random(kills)
    deaths = chance.sample(range(load.prompts // 20, load.prompts * 3 // 4), kills)
    server = MortalServer(lineage, folder, load.ms_per_token, deaths)
    announced: list[str] = []

    def on_shard(shard: str, manifest: Manifest) -> None:
        announced.append(shard)

    calls, began = 1, time.monotonic()
    while True:
        try:
            collect_samples(lineage, lineage.recipe.shards, server.open, on_shard)
            break
        except ServerDied:  # no reply was added in a life, or more deaths than server_restarts
            calls += 1
            announced.clear()
            assert calls <= kills + 1, "more calls failed than servers were killed"
    seconds = time.monotonic() - began
    assert sorted(announced) == list(lineage.recipe.shards)
    lives = [server.events(life) for life in range(len(server.known))]
    assert server.deaths <= server.kills, f"{server.deaths} deaths of {server.kills} kills"
    assert len(lives) == 1 + server.deaths, f"{len(lives)} lives of the server with {server.deaths} deaths"
    check_shards(lineage, lives)
    return {"kills": server.deaths, "calls": calls, "seconds": seconds, **check_lives(lives, server.known)}


def check_shards(lineage: Lineage, lives: Sequence[Any]) -> None:
    """Assert that the files hold each sample once, each as the server sent it, and nothing else is left."""
    texts, replies = invented(lineage.recipe.prompts.count), Texts()
    lengths: dict[int, int] = {}
    for shard in lineage.recipe.shards:
        place = lineage.synthetic_samples(shard)
        place.verify()
        files = sorted(path.name for path in place.folder.iterdir())
        assert files == ["manifest.json", SAMPLES_NAME], f"{shard} has {files}"
        for sample in read_samples(place.folder / SAMPLES_NAME):
            number = int(sample.prompt_id)
            assert number not in lengths, f"{sample.sample_id} is there twice"
            lengths[number] = len(sample.completion_token_ids)
            *but_the_end, _ = map(str, sample.completion_token_ids)
            sent = replies.ids(zlib.crc32(texts[number].encode()), len(but_the_end)).decode()
            assert ",".join(but_the_end) == sent, f"{sample.sample_id} holds other tokens than were sent"
    count = lineage.recipe.prompts.count
    assert sorted(lengths) == list(range(count)), f"{len(lengths)} samples of {count} prompts"
    for events in lives:
        for _, number, tokens in events[events["tokens"] > 0].tolist():
            assert lengths[number] == tokens, f"prompt {number}: {lengths[number]} tokens, sent were {tokens}"


def check_lives(lives: Sequence[Any], known: Sequence[set[int]]) -> dict[str, int]:
    """Assert that no life was asked for what was on the disk when it began; returns what the deaths cost."""
    for life, events in enumerate(lives):
        again = known[life] & asked(events).keys()
        assert not again, f"life {life} was asked again for {len(again)} samples, first {min(again)}"
        doubled = [number for number, times in asked(events).items() if times > 1]
        assert not doubled, f"life {life} was asked twice for {len(doubled)} prompts, first {doubled[0]}"
    sent = sum((answered(events) for events in lives), start=answered(lives[0][:0]))
    return {
        "requests": sum(asked(events).total() for events in lives),
        "samples": len(sent),
        # Sent, and not received whole before the kill.
        "replies_lost_on_the_way": sent.total() - len(sent),
    }
