import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from eagle3_pipeline.errors import ServerDied, ServerNotReady, ServerRefused, ServerStalled
from eagle3_pipeline.serving import readiness
from eagle3_pipeline.serving import server as server_module
from eagle3_pipeline.serving.lease import hold_partition
from eagle3_pipeline.serving.record import ServerRecord, all_records
from eagle3_pipeline.serving.server import open_server, running_servers, stop_servers
from tests.serving.conftest import SpecMaker
from tests.serving.observe import family_of, use_server


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_outlasts_its_step_and_the_next_step_uses_the_same_one_at_once(
    make_spec: SpecMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "eagle3_pipeline")
    with open_server(make_spec(), tmp_path / "logs") as first:
        assert httpx.get(f"{first.base_url}/v1/models").json()["data"][0]["id"] == first.model
        first.check_alive()
        assert first.log.is_relative_to(tmp_path / "logs")
    assert "stays up for later steps and stops by itself after 600 s without work" in caplog.text
    began = time.monotonic()
    with open_server(make_spec(), tmp_path / "logs") as second:
        assert second.pid == first.pid
    assert time.monotonic() - began < 1
    assert [record.served_name for record in running_servers()] == [first.model]


def test_stopping_leaves_no_process_no_port_and_no_record(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec("orphan"), tmp_path) as server:
        family = family_of(server.record)
    assert len(family) == 2
    assert stop_servers(()) == [server.model]
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in family)
    assert is_free(server.record.port)
    assert list(all_records()) == []
    assert stop_servers(()) == []


def test_stop_on_leaving_stops_the_server(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(), tmp_path, stop=True) as server:
        pass
    assert running_servers() == []
    assert not server.record.alive()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_stop_on_leaving_stops_the_server_also_when_the_body_fails(
    failure: type[BaseException], make_spec: SpecMaker, tmp_path: Path
) -> None:
    with pytest.raises(failure), open_server(make_spec(), tmp_path, stop=True) as server:
        raise failure
    assert list(all_records()) == []
    assert not server.record.alive()
    with pytest.raises(failure), open_server(make_spec(), tmp_path) as server:
        raise failure
    server.check_alive()


def test_stop_on_leaving_stops_the_server_also_when_its_loading_is_interrupted(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        assert len(running_servers()) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(server_module, "wait_until_ready", interrupt)
    with pytest.raises(KeyboardInterrupt), open_server(make_spec("hang"), tmp_path, stop=True):
        pass
    assert list(all_records()) == []


def test_a_stop_that_fails_does_not_hide_what_failed_before(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def survive(_: ServerRecord) -> None:
        raise ServerStalled("survives")

    with monkeypatch.context() as patch:
        patch.setattr(server_module, "stop_server", survive)
        with pytest.raises(RuntimeError, match="first"), open_server(make_spec(), tmp_path, stop=True):
            raise RuntimeError("first")
    assert "survives" in caplog.text


def test_only_the_server_of_one_fingerprint_is_stopped_when_that_is_asked(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(), tmp_path) as server:
        pass
    assert stop_servers((), only=make_spec(max_num_seqs=2).fingerprint) == []
    server.check_alive()
    assert stop_servers((), only=server.record.fingerprint) == [server.model]
    assert running_servers() == []


def test_a_server_that_is_in_use_is_not_stopped(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(), tmp_path) as server:
        assert stop_servers(()) == []
        with open_server(make_spec(), tmp_path, stop=True):
            pass
        server.check_alive()


def test_an_idle_server_of_another_fingerprint_is_stopped_first(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(max_num_seqs=1), tmp_path) as old:
        pass
    with open_server(make_spec(max_num_seqs=2), tmp_path) as new:
        assert not old.record.alive()
        assert [record.served_name for record in running_servers()] == [new.model]


def test_servers_on_other_gpus_are_left_alone(make_spec: SpecMaker, tmp_path: Path) -> None:
    with (
        open_server(make_spec(partition=("0",)), tmp_path) as one,
        open_server(make_spec(partition=("1",)), tmp_path),
    ):
        one.check_alive()
        assert len(running_servers()) == 2


def test_training_gets_the_partition_without_the_idle_server(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(), tmp_path):
        pass
    with hold_partition((), "training"):
        assert running_servers() == []
        assert stop_servers(()) == []  # asking again inside is no deadlock


def test_an_instant_crash_is_shown_within_two_seconds_with_its_cause_and_log(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    began = time.monotonic()
    with pytest.raises(ServerDied) as caught, open_server(make_spec("crash"), tmp_path):
        pass
    assert time.monotonic() - began < 2
    message = str(caught.value)
    assert "out of memory" in message
    assert "exit code 1" in message
    assert "Engine core initialization failed" in message
    assert [record.state() for record in all_records()] == ["failed"]


def test_a_python_without_vllm_is_refused_and_not_retried(make_spec: SpecMaker, tmp_path: Path) -> None:
    spec = make_spec()
    spec = replace(spec, argv=(sys.executable, "-c", "raise ModuleNotFoundError(\"No module named 'vllm'\")"))
    with pytest.raises(ServerRefused, match="has no vLLM") as caught, open_server(spec, tmp_path):
        pass
    assert not caught.value.retryable
    with pytest.raises(ServerRefused, match=r"server\.generation\.python"):
        open_server(make_spec(python="/no/such/python"), tmp_path).__enter__()
    assert list(all_records()) == []


def test_a_server_that_hangs_while_loading_is_stopped_the_setting_named_and_not_tried_again(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    words = r"loading weights[\s\S]*raise server\.generation\.start_timeout_s"
    with (
        pytest.raises(ServerNotReady, match=words) as caught,
        open_server(make_spec("hang", start_timeout_s=3), tmp_path),
    ):
        pass
    assert not caught.value.retryable
    assert ServerDied.retryable
    assert [record.state() for record in all_records()] == ["failed"]


def test_a_server_that_hangs_after_it_was_ready_is_stopped_so_that_another_attempt_starts_a_new_one(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_ATTACH_LIMIT_S", 0.2)
    monkeypatch.setattr(readiness, "_TIMEOUT", 0.2)
    with open_server(make_spec(), tmp_path) as server:
        pass
    os.kill(server.pid, signal.SIGSTOP)
    with (
        pytest.raises(ServerStalled, match="It was ready before, so it hangs") as caught,
        open_server(make_spec(), tmp_path),
    ):
        pass
    assert caught.value.retryable
    assert [record.state() for record in all_records()] == ["failed"]


def test_a_server_under_another_name_is_never_taken_for_ours(make_spec: SpecMaker, tmp_path: Path) -> None:
    with (
        pytest.raises(ServerNotReady, match=r"serves \['another-model'\]"),
        open_server(make_spec("other-name", start_timeout_s=1.5), tmp_path),
    ):
        pass


def test_a_foreign_process_on_the_recipes_port_is_named_and_left_alone(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        with pytest.raises(ServerRefused, match=rf"port {port} .* is held by pid {os.getpid()} \(.*py"):
            open_server(make_spec(port=port), tmp_path).__enter__()
    assert list(all_records()) == []


def test_extra_env_of_the_recipe_wins_over_what_we_set(make_spec: SpecMaker, tmp_path: Path) -> None:
    spec = make_spec()
    spec = replace(spec, env={**spec.env, "VLLM_RPC_BASE_PATH": "/own"})
    with open_server(spec, tmp_path) as server:
        assert psutil.Process(server.pid).environ()["VLLM_RPC_BASE_PATH"] == "/own"


def test_neither_a_server_nor_its_watcher_gets_a_secret(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"HF_TOKEN", "VLLM_API_KEY", "EAGLE3_SLACK_WEBHOOK", "DAGSTER_PG_URL"}
    for name in secrets:
        monkeypatch.setenv(name, "of the shell")
    with open_server(make_spec(), tmp_path, stop=True) as server:
        assert server.record.watcher is not None
        for pid in (server.pid, server.record.watcher.pid):
            assert not secrets & psutil.Process(pid).environ().keys()


def test_two_processes_that_start_at_once_share_one_server(make_spec: SpecMaker, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    steps = [context.Process(target=use_server, args=(make_spec("slow"), tmp_path, 0.5)) for _ in range(3)]
    for step in steps:
        step.start()
    for step in steps:
        step.join(20)
    assert [step.exitcode for step in steps] == [0, 0, 0]
    pids = {json.loads(path.read_text()) for path in tmp_path.glob("pid-*")}
    assert len(list(tmp_path.glob("pid-*"))) == 3
    assert len(pids) == 1


def test_two_servers_wait_for_each_other_when_they_want_the_same_gpu(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    order: list[str] = []

    def other() -> None:
        with open_server(make_spec(max_num_seqs=2, partition=("1", "2")), tmp_path):
            order.append("second")

    thread = threading.Thread(target=other)
    with open_server(make_spec(max_num_seqs=1, partition=("0", "1")), tmp_path) as first:
        thread.start()
        time.sleep(0.5)
        first.check_alive()
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]
    assert not first.record.alive()
