"""States that are captured while the samples are generated: a server that leaves them, and what is kept."""

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from eagle3_pipeline.errors import Busy, ServerDied, ServerRefused
from eagle3_pipeline.generation import captured_states
from eagle3_pipeline.generation.captured_states import capture_staging
from eagle3_pipeline.generation.collection import collect_samples
from eagle3_pipeline.journal import read_journal
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts.selection import make_prompts
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.samples import read_samples
from eagle3_pipeline.serving.server import stop_servers
from eagle3_pipeline.staging import FAILED_SUFFIX, NO_ROOM_SUFFIX, staging_folder
from eagle3_pipeline.target import make_target
from resources import VllmServers
from tests.fakes.process import SERVED_NAME, stand_in
from tests.generation.chat_server import ChatServer, chat_body, serve_chat
from tests.generation.world import asked_id, make_lineage
from tests.recipes import tiny_recipe

CAPTURES = {"layers": [1, 2, 3, 4], "while_generating": True}
GREEDY = {"concurrency": 4, "max_completion_tokens": 64, "request_timeout_s": 30, "temperature": 0.0}
SHARD = "p2-s000"


def capturing(tmp_path: Path, turns: list[int], **sections: Any) -> Lineage:
    return make_lineage(tmp_path, turns, 2, **{"extraction": CAPTURES, "generation": GREEDY} | sections)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with serve_chat() as running:
        yield running


def staging_of(lineage: Lineage) -> Path:
    folder = capture_staging(lineage)
    assert folder is not None
    return folder


def leave(lineage: Lineage, write: Callable[[Path], object] = lambda path: path.write_text(path.stem)) -> Any:
    """How a capturing server behaves: it names a file, and `write` makes of it what a test wants."""

    def behave(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        path = staging_of(lineage) / f"{asked_id(body['messages'])}.safetensors"
        reply = chat_body() | {"kv_transfer_params": {"hidden_states_path": str(path)}}
        if body.get("kv_transfer_params") == {"include_output_tokens": True}:
            write(path)
        handler.answer(200, reply)  # type: ignore[attr-defined]
        return True

    return behave


def collect(lineage: Lineage, server: ChatServer) -> None:
    collect_samples(lineage, lineage.recipe.shards, server.open, lambda shard, manifest: None)


def kept(lineage: Lineage, shard: str = SHARD) -> list[str]:
    return sorted(path.stem for path in lineage.captured(shard).glob("*"))


def staged(lineage: Lineage) -> list[Path]:
    return list(staging_of(lineage).glob("*.safetensors*"))


def recorded(lineage: Lineage, shard: str = SHARD) -> list[str]:
    samples = read_samples(lineage.synthetic_samples(shard).folder / "samples.parquet")
    return [sample.sample_id for sample in samples]


def test_each_samples_file_waits_in_the_folder_of_its_shard_and_staging_is_empty(
    server: ChatServer, tmp_path: Path
) -> None:
    lineage = capturing(tmp_path, [2, 1, 1, 1])
    server.behave = leave(lineage)
    collect(lineage, server)
    assert kept(lineage) == recorded(lineage) == ["p0-t0", "p0-t1", "p1-t0"]
    assert kept(lineage, "p2-s001") == ["p2-t0", "p3-t0"]
    assert staged(lineage) == []
    assert all(body["temperature"] == 0 for body in server.bodies)


def test_without_the_setting_nothing_is_asked_for_and_no_folder_is_made(
    server: ChatServer, tmp_path: Path
) -> None:
    lineage = make_lineage(tmp_path, [1, 1], 2)
    collect(lineage, server)
    assert not any("kv_transfer_params" in body for body in server.bodies)
    assert capture_staging(lineage) is None
    assert not lineage.staging.parent.exists()
    assert not lineage.captured(SHARD).exists()


def test_a_file_is_in_its_place_before_its_sample_is_in_the_journal(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = capturing(tmp_path, [1, 1])
    journal = lineage.synthetic_samples(SHARD).folder / "replies.jsonl"
    seen: list[set[str]] = []
    replace = Path.replace

    def look(self: Path, target: Path) -> Path:
        if target.parent == lineage.captured(SHARD):
            seen.append({one["sample_id"] for one in read_journal(journal)} & {target.stem})
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    server.behave = leave(lineage)
    collect(lineage, server)
    assert seen == [set(), set()]


def test_a_file_that_comes_after_the_reply_is_waited_for(server: ChatServer, tmp_path: Path) -> None:
    lineage = capturing(tmp_path, [1, 1])

    def late(path: Path) -> None:
        threading.Timer(0.3, path.write_text, ["states"]).start()

    server.behave = leave(lineage, late)
    collect(lineage, server)
    assert kept(lineage) == recorded(lineage) == ["p0-t0", "p1-t0"]


@pytest.mark.parametrize("suffix", [None, NO_ROOM_SUFFIX, FAILED_SUFFIX])
def test_a_file_that_never_comes_costs_the_states_and_not_the_sample(
    suffix: str | None, server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_states, "_FILE_S", 0.05)
    lineage = capturing(tmp_path, [1, 1])

    def fail(path: Path) -> None:
        if path.stem == "p1-t0":
            path.write_text("states")
        elif suffix is not None:
            path.with_name(path.name + suffix).write_text("the disk")

    server.behave = leave(lineage, fail)
    collect(lineage, server)
    assert recorded(lineage) == ["p0-t0", "p1-t0"]
    assert kept(lineage) == ["p1-t0"]
    assert staged(lineage) == []


def test_files_of_samples_that_do_not_train_and_all_on_a_full_disk_are_not_kept(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = capturing(tmp_path, [1, 1])

    def empty(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        path = staging_of(lineage) / f"{asked_id(body['messages'])}.safetensors"
        path.write_text("states")
        reply = chat_body("") | {"kv_transfer_params": {"hidden_states_path": str(path)}}
        reply["choices"][0]["token_ids"] = [2]
        handler.answer(200, reply)  # type: ignore[attr-defined]
        return True

    server.behave = empty
    collect(lineage, server)
    assert kept(lineage) == []

    full = capturing(tmp_path / "full", [1, 1])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(captured_states.shutil, "disk_usage", lambda folder: usage._replace(free=2**29))
    server.behave = leave(full)
    collect(full, server)
    assert recorded(full) == ["p0-t0", "p1-t0"]
    assert kept(full) == []


def test_once_the_budget_of_the_recipe_is_used_up_samples_are_recorded_without_states(
    server: ChatServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lineage = capturing(tmp_path, [1] * 6, storage={"max_gib": 1e-4}, generation={**GREEDY, "concurrency": 1})
    server.behave = leave(lineage, lambda path: path.write_bytes(bytes(50_000)))
    with caplog.at_level(logging.WARNING):
        collect(lineage, server)
    shards = ("p2-s000", "p2-s001", "p2-s002")
    assert sum(len(recorded(lineage, shard)) for shard in shards) == 6
    assert sum(len(kept(lineage, shard)) for shard in shards) in (1, 2)
    assert [one for one in caplog.messages if "storage.max_gib (0.0001) is used up" in one] != []


def test_a_reply_that_names_no_file_or_a_foreign_one_ends_the_job_before_it_is_recorded(
    server: ChatServer, tmp_path: Path
) -> None:
    lineage = capturing(tmp_path, [1, 1])
    with pytest.raises(ServerRefused, match="names None for its hidden states"):
        collect(lineage, server)
    assert list(read_journal(lineage.synthetic_samples(SHARD).folder / "replies.jsonl")) == []
    server.behave = leave(capturing(tmp_path / "other", [1, 1]), lambda path: None)
    with pytest.raises(ServerRefused, match="was started otherwise"):
        collect(lineage, server)


def test_after_the_servers_death_what_is_left_is_asked_again_with_its_states(
    server: ChatServer, tmp_path: Path
) -> None:
    lineage = capturing(tmp_path, [1] * 4)
    well = leave(lineage)

    def die(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        if server.opened == 1 and asked_id(body["messages"]) in ("p2-t0", "p3-t0"):
            time.sleep(0.3)
            server.death = ServerDied("it died")
            handler.answer(500, {})  # type: ignore[attr-defined]
            return True
        return bool(well(handler, body))

    server.behave = die
    collect(lineage, server)
    assert server.opened == 2
    assert kept(lineage) == recorded(lineage)
    assert kept(lineage, "p2-s001") == recorded(lineage, "p2-s001") == ["p2-t0", "p3-t0"]


def test_one_process_at_a_time_captures(server: ChatServer, tmp_path: Path) -> None:
    lineage = capturing(tmp_path, [1, 1])
    with staging_folder(staging_of(lineage)), pytest.raises(Busy):
        collect(lineage, server)


def test_a_file_that_nobody_takes_is_swept(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_states, "_STALE_S", -1.0)
    monkeypatch.setattr(captured_states, "_SWEEP_EVERY_S", -1.0)
    lineage = capturing(tmp_path, [2, 1])
    gone: list[bool] = []

    def write(path: Path) -> None:
        given_up = path.with_name("given-up.safetensors")
        if path.stem == "p0-t1":
            while given_up.exists():
                time.sleep(0.01)
            gone.append(True)
        else:
            given_up.write_text("states")
        threading.Timer(0.5, path.write_text, ["states"]).start()

    server.behave = leave(lineage, write)
    collect(lineage, server)
    assert gone == [True]


def test_the_stand_in_gives_garbage_when_it_samples_and_captures_as_vllm_does(
    tmp_path: Path, tiny_llama: Path
) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}},
    }
    transfer = {"kv_connector_extra_config": {"shared_storage_path": str(staging)}}
    flags = ("--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer))
    asked = {"model": SERVED_NAME, "messages": [{"role": "user", "content": "Hello!"}]}
    with stand_in(tmp_path / "server", tiny_llama, *flags) as running:
        sampled, greedy = (
            running.client.post(
                "/v1/chat/completions", json={**asked, "temperature": heat, "return_token_ids": True}
            ).json()["choices"][0]["token_ids"]
            for heat in (0.7, 0)
        )
    assert len(set(sampled)) == 1
    assert len(sampled) > 8
    assert len(set(greedy)) > 4


def test_from_the_recipe_to_states_on_the_disk_through_server_processes(
    tmp_path: Path, tiny_llama: Path
) -> None:
    path = tiny_recipe(
        tmp_path,
        tiny_llama,
        fake=True,
        generation={"temperature": 0.0},
        extraction={"while_generating": True},
        prompts={"count": 8, "per_shard": 4},
    )
    lineage = Lineage(load_recipe(str(path), tmp_path), tmp_path / "storage")
    make_target(lineage)
    make_prompts(lineage)
    first, second = lineage.recipe.shards
    layers = lineage.recipe.extraction.layers
    servers = VllmServers()
    try:
        for shard in (first, second):
            collect_samples(lineage, [shard], partial(servers.generation, lineage), lambda *_: None)
            for sample in read_samples(lineage.synthetic_samples(shard).folder / "samples.parquet"):
                with safe_open(lineage.captured(shard) / f"{sample.sample_id}.safetensors", "np") as file:
                    assert file.get_tensor("token_ids").tolist() == sample.token_ids[:-1]
                    assert file.get_slice("hidden_states").get_shape()[:2] == [
                        len(sample.token_ids) - 1,
                        len(layers),
                    ]
        logs = {
            log.name.rpartition(".")[0] for log in lineage.logs.glob("*.log") if "watcher" not in log.name
        }
        assert len(logs) == 2  # the plain one for the canary, once, and one that captures for both shards
        assert servers.release_generation(lineage) != []
    finally:
        stop_servers(())
    assert staged(lineage) == []
    assert len(list((lineage.folder / "canary").iterdir())) == 1
