import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import BadInput, Busy, MissingInput, NotEnoughRoom, RecipeError, ServerDied
from eagle3_pipeline.generation import collection, life
from eagle3_pipeline.generation.collection import collect_samples, open_shard
from eagle3_pipeline.generation.shard_generation import ShardGeneration
from eagle3_pipeline.journal import read_journal
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.samples import read_samples
from tests.generation.chat_server import ChatServer, chat_body, serve_chat
from tests.generation.world import Answers, make_lineage, run_job


@pytest.fixture
def server() -> Iterator[ChatServer]:
    """A server on a real socket."""
    with serve_chat() as running:
        yield running


def collect(lineage: Lineage, server: ChatServer) -> list[str]:
    announced: list[str] = []

    def on_shard(shard: str, manifest: Manifest) -> None:
        assert threading.current_thread() is threading.main_thread()
        announced.append(shard)

    made = collect_samples(lineage, lineage.recipe.shards, server.open, on_shard)
    assert [manifest.shard for manifest in made] == list(lineage.recipe.shards)
    return announced


def wait_for_records(lineage: Lineage, count: int) -> None:
    """Return when so many replies to the first shard are in its journal (and its header)."""
    path = lineage.synthetic_samples(lineage.recipe.shards[0]).folder / "replies.jsonl"
    deadline = time.monotonic() + 20
    while path.read_bytes().count(b"\n") < count + 1:
        assert time.monotonic() < deadline, "the replies were not recorded"
        time.sleep(0.01)


def test_all_shards_are_made_with_one_server_and_each_is_announced_once(
    server: ChatServer, tmp_path: Path
) -> None:
    lineage = make_lineage(tmp_path, [1, 2, 1, 1], 2)
    assert sorted(collect(lineage, server)) == ["p2-s000", "p2-s001"]
    assert server.opened == 1
    assert sorted(server.asked) == ["p0-t0", "p1-t0", "p1-t1", "p2-t0", "p3-t0"]
    facts = lineage.synthetic_samples("p2-s000").verify().facts
    expected = {
        "samples": 3,
        "good": 3,
        "truncated": 0,
        "refused": 0,
        "prompt_tokens": 9,
        "completion_tokens": 9,
    }
    assert {name: facts[name] for name in expected} == expected
    assert facts["completion_lengths"] == {"edges": [0, 1, 2, 3, 4], "counts": [0, 0, 0, 3]}
    folder = lineage.synthetic_samples("p2-s000").folder
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "samples.parquet"]
    assert read_samples(folder / "samples.parquet")[0].server == "server-fingerprint"


def test_what_is_made_is_announced_again_and_neither_asked_for_nor_served(
    server: ChatServer, tmp_path: Path
) -> None:
    lineage = make_lineage(tmp_path, [1] * 4, 2)
    collect(lineage, server)
    digests = [lineage.synthetic_samples(shard).require().digest for shard in lineage.recipe.shards]
    assert collect(lineage, server) == ["p2-s000", "p2-s001"]
    assert server.opened == 1
    assert len(server.asked) == 4
    assert digests == [lineage.synthetic_samples(shard).require().digest for shard in lineage.recipe.shards]


def test_raising_the_count_asks_exactly_for_the_new_prompts(server: ChatServer, tmp_path: Path) -> None:
    collect(make_lineage(tmp_path, [1] * 4, 2), server)
    server.asked.clear()
    more = make_lineage(tmp_path, [1] * 8, 2)
    assert sorted(collect(more, server)) == ["p2-s000", "p2-s001", "p2-s002", "p2-s003"]
    assert sorted(server.asked) == ["p4-t0", "p5-t0", "p6-t0", "p7-t0"]


def test_another_size_of_shards_is_another_plan(server: ChatServer, tmp_path: Path) -> None:
    collect(make_lineage(tmp_path, [1] * 4, 2), server)
    collect(make_lineage(tmp_path, [1] * 4, 4), server)
    assert len(server.asked) == 8


def test_a_shard_whose_replies_are_all_recorded_is_finished_without_a_server(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = make_lineage(tmp_path, [1] * 2, 2)

    def killed(work: ShardGeneration, readings: Any = ()) -> Manifest:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ShardGeneration, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            run_job(lineage, Answers())
    assert collect(lineage, server) == ["p2-s000"]
    assert server.opened == 0


def test_a_shard_is_never_made_by_two_processes_at_once(server: ChatServer, tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 4, 2)
    other = open_shard(lineage, "p2-s001")
    assert isinstance(other, ShardGeneration)
    with other, pytest.raises(Busy, match="p2-s001"):
        collect(lineage, server)
    assert server.opened == 0
    assert sorted(collect(lineage, server)) == ["p2-s000", "p2-s001"]


def test_a_leftover_journal_of_a_finished_shard_goes(server: ChatServer, tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 2, 2)
    collect(lineage, server)
    leftover = lineage.synthetic_samples("p2-s000").folder / "replies.jsonl"
    leftover.write_text("{}\n")
    collect(lineage, server)
    assert not leftover.exists()


def test_a_shard_of_another_plan_is_refused(server: ChatServer, tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 2, 2)
    with pytest.raises(RecipeError, match="no shard p9-s000"):
        collect_samples(lineage, ["p9-s000"], server.open, lambda shard, manifest: None)


def test_without_prompts_the_step_to_materialise_is_named(server: ChatServer, tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 2, 2)
    (lineage.prompts().folder / "manifest.json").unlink()
    with pytest.raises(MissingInput, match="prompts"):
        collect(lineage, server)


def dies_after(server: ChatServer, lineage: Lineage, *replies: int) -> None:
    """Let the first life of the server end once so many replies are recorded, the next after so many more."""
    recorded = list(accumulate(replies))
    lives = [threading.Semaphore(count) for count in replies]

    def behave(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        life = server.opened - 1
        if life >= len(replies) or lives[life].acquire(blocking=False):
            return False
        wait_for_records(lineage, recorded[life])
        server.death = ServerDied(f"life {life + 1} ended with the last lines of its log")
        handler.close_connection = True
        return True

    server.behave = behave


def test_a_server_that_dies_is_followed_by_another_that_is_asked_for_the_rest_only(
    server: ChatServer, tmp_path: Path
) -> None:
    lineage = make_lineage(tmp_path, [1] * 50, 50)
    dies_after(server, lineage, 5, 20)
    collect(lineage, server)
    assert server.opened == 3
    facts = lineage.synthetic_samples("p50-s000").require().facts
    assert (facts["samples"], facts["good"]) == (50, 50)


def test_a_server_that_dies_too_often_ends_the_step_with_all_else_still_to_do(
    server: ChatServer, tmp_path: Path
) -> None:
    generation = {"concurrency": 4, "max_completion_tokens": 64, "server_restarts": 1}
    lineage = make_lineage(tmp_path, [1] * 50, 50, generation=generation)
    dies_after(server, lineage, 5, 1, 1)
    with pytest.raises(ServerDied, match="life 2 ended"):
        collect(lineage, server)
    assert server.opened == 2
    server.asked.clear()
    collect_again = {**generation, "server_restarts": 5}
    collect(make_lineage(tmp_path, [1] * 50, 50, generation=collect_again), server)
    assert len(set(server.asked)) == 44


def test_after_two_lives_without_a_reply_no_server_is_started_again(
    server: ChatServer, tmp_path: Path
) -> None:
    lineage = make_lineage(tmp_path, [1] * 50, 50)
    dies_after(server, lineage, 0, 0, 0)
    with pytest.raises(ServerDied, match="life 2 ended"):
        collect(lineage, server)
    assert server.opened == 2


def test_a_prompt_that_kills_each_server_leaves_all_others_answered(
    server: ChatServer, tmp_path: Path
) -> None:
    lineage = make_lineage(tmp_path, [1] * 50, 50)

    def die_at_the_first(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        if server.asked[-1] != "p0-t0" and body["messages"][-1]["content"] != "p0.0":
            return False
        server.death = ServerDied("killed by a prompt")
        handler.close_connection = True
        return True

    server.behave = die_at_the_first
    with pytest.raises(ServerDied, match="killed by a prompt"):
        collect(lineage, server)
    (journal,) = (lineage.synthetic_samples("p50-s000").folder).glob("*.jsonl")
    answered = {record["sample_id"] for record in read_journal(journal)}
    assert "p0-t0" not in answered
    assert len(answered) >= 46  # but for those that were out with it


def test_a_full_disk_is_named_also_when_a_shard_is_opened(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(collection, "ShardGeneration", no_room)
    with pytest.raises(NotEnoughRoom, match="Recorded replies stand"):
        collect(make_lineage(tmp_path, [1] * 2, 2), server)


def test_a_connection_lost_in_the_middle_of_a_reply_is_tried_again(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = threading.Semaphore(1)

    def tear(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        if not torn.acquire(blocking=False):
            return False
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"choices": [')
        handler.close_connection = True
        return True

    server.behave = tear
    lineage = make_lineage(tmp_path, [1] * 2, 2)
    collect(lineage, server)
    assert len(server.asked) == 3
    assert lineage.synthetic_samples("p2-s000").require().facts["good"] == 2


def test_two_begin_tokens_stop_the_job(server: ChatServer, tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 2, 2)
    model = tmp_path / "model"
    config = {
        "added_tokens_decoder": {"1": {"content": "<s>"}},
        "bos_token": "<s>",
        "chat_template": "{{ bos_token }}",
    }
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    place = lineage.target_model()  # the tokenizer is part of the target: another place
    place.folder.mkdir(parents=True)
    place.finish([], {"model_path": str(model), "model_fingerprint": "target", "hidden_size": 8})

    def twice(handler: Any, body: dict[str, Any]) -> bool:
        handler.answer(200, {**chat_body(), "prompt_token_ids": [1, 1, 5]})
        return True

    server.behave = twice
    with pytest.raises(BadInput, match="2 begin tokens"):
        collect(lineage, server)


def test_a_cancel_in_the_middle_keeps_what_was_answered_and_leaves_no_thread(
    server: ChatServer, tmp_path: Path
) -> None:
    lineage = make_lineage(tmp_path, [1] * 20, 20)
    answered, once, release = threading.Semaphore(5), threading.Semaphore(1), threading.Event()

    def hold(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        if answered.acquire(blocking=False):
            return False
        wait_for_records(lineage, 5)
        if once.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C while requests are out
        release.wait(20)
        return False

    server.behave = hold
    with pytest.raises(KeyboardInterrupt):
        collect(lineage, server)
    release.set()
    assert not [thread for thread in threading.enumerate() if thread.name == "generation"]
    server.behave = lambda handler, body: False
    server.asked.clear()
    collect(lineage, server)
    assert len(server.asked) == 15


def test_the_job_tells_every_few_seconds_how_it_goes(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(life, "PULSE_S", 0.01)
    told = threading.Event()

    def wait_for_a_line(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        while "2 in flight" not in caplog.text and not told.wait(0.01):
            pass
        told.set()
        return False

    server.behave = wait_for_a_line
    caplog.set_level("INFO", logger="eagle3_pipeline")
    collect(make_lineage(tmp_path, [1] * 2, 2), server)
    assert "0/2 replies, 2 in flight" in caplog.text
    assert "p2-s000 is made: 2 samples (2 good, 0 truncated), 6 completion tokens" in caplog.text
