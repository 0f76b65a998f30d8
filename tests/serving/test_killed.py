"""What a kill leaves behind at any moment of a server's life, and who clears it up."""

import multiprocessing
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from eagle3_pipeline.errors import ServerDied
from eagle3_pipeline.serving import starting, stopping
from eagle3_pipeline.serving.process import ProcessIdentity, find_family
from eagle3_pipeline.serving.record import ServerRecord, all_records, new_record
from eagle3_pipeline.serving.server import open_server, running_servers, stop_servers
from eagle3_pipeline.serving.specification import ServerSpec
from tests.serving.conftest import SpecMaker
from tests.serving.observe import family_of, freeze_watcher, use_server, wait_for


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
    wait_for(lambda: family_of(server.record) == [] and server.record.state() == "failed")
    wait_for(lambda: [record.failure for record in all_records()] == ["ServerDied"])


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
    replace(server.record, process=None, watcher=None, stage="starting").write()
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
    assert not record.scratch.exists()


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
            assert folder == server.record.scratch
            assert len(f"{folder}/") + 36 < 107
            assert folder.stat().st_mode & 0o777 == 0o700
            with socket.socket(socket.AF_UNIX) as left_behind:
                left_behind.bind(str(folder / "5f3c"))
        end()
        wait_for(lambda folder=folder: not folder.exists())  # type: ignore[misc]
        assert running_servers() == []


def test_memory_that_killed_ranks_shared_goes_with_their_server_and_no_other(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(stopping, "_SHARED_MEMORY", memory)
    with open_server(make_spec(), tmp_path) as server:
        (server.record.scratch / "vllm_dist_5f3c").touch()
    others = memory / "vllm_dist_77-tp:0-[0-1]-cpushm_0"
    for segment in (others, memory / "vllm_dist_5f3c-tp:0-[0-1]-cpushm_0"):
        segment.touch()
    stop_servers(())
    assert list(memory.iterdir()) == [others]


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
