"""Records of other pid namespaces, as another container writes them into a shared host state."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_pipeline.cli import main
from eagle3_pipeline.errors import Busy
from eagle3_pipeline.serving.lease import hold_partition
from eagle3_pipeline.serving.process import find_family, pid_namespace
from eagle3_pipeline.serving.record import ServerRecord, all_records, read_record
from eagle3_pipeline.serving.server import open_server, running_servers, stop_servers
from tests.serving.conftest import SpecMaker
from tests.serving.observe import wait_for


@contextmanager
def elsewhere(record: ServerRecord) -> Iterator[ServerRecord]:
    """The record of a living server, as if it had been written in another container."""
    there = replace(record, namespace="pid:[1]")
    there.write()
    try:
        yield there
    finally:
        record.write()


def end(record: ServerRecord) -> None:
    """Kill -9 server, children and watcher, as the end of a container does."""
    assert record.watcher is not None
    family = [record.watcher, *find_family(record.process, record.marker)]
    for process in family:
        process.send(signal.SIGKILL)
    wait_for(lambda: not any(process.alive() for process in family))


def test_a_record_tells_its_pid_namespace(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(), tmp_path) as server:
        assert server.record.namespace == pid_namespace() == str(Path("/proc/self/ns/pid").readlink())
        assert not server.record.foreign


@pytest.mark.parametrize("max_num_seqs", [1, 2], ids=["the same server", "another server"])
def test_gpus_with_a_living_server_of_another_container_are_busy_and_its_record_stays(
    max_num_seqs: int, make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(max_num_seqs=1), tmp_path) as server:
        pass
    with elsewhere(server.record) as record:
        words = rf"{server.model} on the CPU \(pid {server.pid} of another container, pid:\[1\], port"
        with pytest.raises(Busy, match=words):
            open_server(make_spec(max_num_seqs=max_num_seqs), tmp_path).__enter__()
        with pytest.raises(Busy, match=words), hold_partition((), "training"):
            pass
        with pytest.raises(Busy, match=words):
            stop_servers(())
        assert running_servers() == [record]
        assert read_record(record.path) == record
    server.check_alive()


def test_servers_of_a_container_that_ended_are_forgotten(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(), tmp_path) as server:
        pass
    with elsewhere(server.record) as record:
        end(record)
        assert list(all_records()) == []
        assert not record.path.exists()
        assert not record.life.exists()
    with open_server(make_spec(), tmp_path) as again:
        assert again.pid != server.pid


def test_a_server_of_another_container_lives_as_long_as_its_watcher_that_clears_up_after_it(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(), tmp_path) as server:
        pass
    with elsewhere(server.record) as record:
        for process in find_family(record.process, record.marker):
            process.send(signal.SIGKILL)
        wait_for(lambda: find_family(record.process, record.marker) == [])
        assert running_servers() == [record]
        end(record)
        assert running_servers() == []


def test_the_command_line_says_that_it_leaves_a_server_of_another_container_alone(
    make_spec: SpecMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_server(make_spec(), tmp_path) as server:
        pass
    with elsewhere(server.record):
        assert main(["server", "stop"]) == 0
        assert "left alone." in capsys.readouterr().out
    assert main(["server", "status"]) == 0
    assert "stops by itself at" in capsys.readouterr().out
    assert main(["server", "stop"]) == 0
    assert ": stopped" in capsys.readouterr().out
    assert running_servers() == []
