import json
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from eagle3_pipeline.errors import ServerDied, ServerNotReady, ServerRefused, ServerStalled
from eagle3_pipeline.serving import readiness, starting
from eagle3_pipeline.serving import server as server_module
from eagle3_pipeline.serving.lease import hold_partition
from eagle3_pipeline.serving.process import ProcessIdentity, find_family
from eagle3_pipeline.serving.record import ServerRecord, all_records, new_record
from eagle3_pipeline.serving.server import open_server, running_servers, stop_servers
from eagle3_pipeline.serving.specification import ServerSpec
from tests.serving.conftest import SpecMaker


def family_of(record: ServerRecord) -> list[int]:
    return [process.pid for process in find_family(record.process, record.marker)]


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
    assert list(all_records()) == []


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
    assert list(all_records()) == []


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
    assert list(all_records()) == []


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


def test_check_alive_tells_of_a_death_in_the_middle_of_work(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(), tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not server.record.alive())
        with pytest.raises(
            ServerDied, match=r"after it was ready with signal 9 \(SIGKILL\)[\s\S]*loading weights"
        ):
            server.check_alive()


@pytest.mark.parametrize("behave", ["orphan", "runaway", "deaf"])
def test_children_of_a_killed_server_are_found_and_ended_at_the_next_start(
    behave: str, make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(behave), tmp_path) as server:
        freeze_watcher(server.record)
        family = family_of(server.record)
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not server.record.alive())
        assert family_of(server.record), "the child outlives its parent"
    with open_server(make_spec(behave), tmp_path) as again:
        assert again.pid != server.pid
        assert not set(family) & set(family_of(again.record))
        assert family_of(server.record) == []


def test_children_are_ended_by_the_watcher_when_no_step_comes(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec("orphan", idle_timeout_s=1), tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: family_of(server.record) == [] and list(all_records()) == [])


def test_a_record_whose_pid_went_to_a_stranger_signals_nobody(make_spec: SpecMaker, tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        identity = ProcessIdentity.of(stranger.pid)
        assert identity is not None
        spec = make_spec()
        stale = replace(identity, start_ticks=identity.start_ticks - 100)
        stale_record(spec, stale).write()
        assert running_servers() == []
        with open_server(spec, tmp_path) as server:
            assert server.pid != stranger.pid
        assert stranger.poll() is None
        stale_record(make_spec(max_num_seqs=3), stale).write()
        stop_servers(())
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_record_of_an_earlier_boot_is_forgotten(make_spec: SpecMaker) -> None:
    stranger = ProcessIdentity.of(os.getpid())
    assert stranger is not None
    record = stale_record(make_spec(), replace(stranger, boot_id="earlier"))
    replace(record, boot_id="earlier").write()
    assert list(all_records()) == []
    assert not record.path.exists()


def test_a_starter_killed_right_after_the_spawn_leaves_a_server_that_is_found_by_its_marker(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(), tmp_path) as server:
        freeze_watcher(server.record)
    replace(server.record, process=None, watcher=None, ready=False).write()
    with open_server(make_spec(), tmp_path) as again:
        assert again.pid != server.pid
        assert not server.record.alive()


def test_a_step_killed_while_its_server_loads_leaves_it_to_the_next_step(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    spec = make_spec("slow")
    step = multiprocessing.get_context("fork").Process(target=use_server, args=(spec, tmp_path, 0))
    step.start()
    wait_for(lambda: any(record.process for record in running_servers()))
    loading = running_servers()[0]
    step.kill()
    step.join()
    with open_server(spec, tmp_path) as server:
        assert loading.process is not None
        assert server.pid == loading.process.pid


@pytest.mark.parametrize("killed_in", ["start_process", "replace"])
def test_a_step_killed_while_it_starts_a_server_leaves_nothing_behind_for_long(
    killed_in: str, make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the server is started, and after that but before its process is written down."""
    step = multiprocessing.get_context("fork").Process(
        target=start_and_be_killed, args=(killed_in, make_spec(idle_timeout_s=1), tmp_path)
    )
    step.start()
    step.join(20)
    assert step.exitcode == -signal.SIGKILL
    (record,) = running_servers()
    assert record.process is None
    assert "just being started" in str(record)
    assert bool(find_family(None, record.marker)) == (killed_in == "replace")
    wait_for(lambda: list(all_records()) == [] and find_family(None, record.marker) == [])
    assert not record.sockets.exists()


def test_an_interrupted_start_leaves_nothing_behind(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = starting.start_process
    seen: list[ServerRecord] = []

    def interrupted(argv: tuple[str, ...], *rest: object, **named: object) -> ProcessIdentity:
        process = real(argv, *rest, **named)  # type: ignore[arg-type]
        if "eagle3_pipeline.serving.watcher" not in argv:
            seen.extend(all_records())
            raise KeyboardInterrupt
        return process

    monkeypatch.setattr(starting, "start_process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_server(make_spec(), tmp_path).__enter__()
    assert list(all_records()) == []
    assert find_family(None, seen[0].marker) == []
    watcher = seen[0].watcher
    assert watcher is not None
    wait_for(lambda: not watcher.alive())


def test_sockets_of_a_server_have_a_short_folder_that_goes_with_the_server(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/inherited")
    for end in (lambda: stop_servers(()), lambda: os.kill(server.pid, signal.SIGKILL)):
        with open_server(make_spec(idle_timeout_s=1), tmp_path) as server:
            folder = Path(psutil.Process(server.pid).environ()["VLLM_RPC_BASE_PATH"])
            assert folder == server.record.sockets
            assert len(f"{folder}/") + 36 < 107
            assert folder.stat().st_mode & 0o777 == 0o700
            with socket.socket(socket.AF_UNIX) as left_behind:
                left_behind.bind(str(folder / "5f3c"))
        end()
        wait_for(lambda: list(all_records()) == [])
        assert not folder.exists()


def test_extra_env_of_the_recipe_wins_over_what_we_set(make_spec: SpecMaker, tmp_path: Path) -> None:
    spec = make_spec()
    spec = replace(spec, env={**spec.env, "VLLM_RPC_BASE_PATH": "/own"})
    with open_server(spec, tmp_path) as server:
        assert psutil.Process(server.pid).environ()["VLLM_RPC_BASE_PATH"] == "/own"


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


def test_a_watcher_that_was_killed_is_started_again_by_the_next_step(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(), tmp_path) as server:
        assert server.record.watcher is not None
        server.record.watcher.send(signal.SIGKILL)
        wait_for(lambda: not (server.record.watcher and server.record.watcher.alive()))
    with open_server(make_spec(), tmp_path) as again:
        assert again.pid == server.pid
        assert again.record.watcher is not None
        assert again.record.watcher.alive()


def use_server(spec: ServerSpec, folder: Path, seconds: float) -> None:
    with open_server(spec, folder) as server:
        (folder / f"pid-{os.getpid()}").write_text(json.dumps(server.pid))
        time.sleep(seconds)


def start_and_be_killed(where: str, spec: ServerSpec, folder: Path) -> None:
    real: Callable[..., ProcessIdentity] = starting.start_process

    def start(argv: tuple[str, ...], *rest: object, **named: object) -> ProcessIdentity:
        is_server = "eagle3_pipeline.serving.watcher" not in argv
        if is_server and where == "start_process":
            os.kill(os.getpid(), signal.SIGKILL)
        process = real(argv, *rest, **named)
        if is_server:
            os.kill(os.getpid(), signal.SIGKILL)
        return process

    starting.start_process = start  # in this process alone
    open_server(spec, folder).__enter__()


def stale_record(spec: ServerSpec, process: ProcessIdentity) -> ServerRecord:
    record = new_record(
        fingerprint=spec.fingerprint,
        served_name=spec.served_name,
        phase=spec.phase,
        gpus=(),
        port=1024,
        log="/nowhere",
        marker="stale",
        idle_timeout_s=600,
    )
    return replace(record, process=process)


def freeze_watcher(record: ServerRecord) -> None:
    assert record.watcher is not None
    record.watcher.send(signal.SIGKILL)


def wait_for(done: object, limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
