import logging
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_pipeline.errors import Busy
from eagle3_pipeline.serving import watcher as watcher_module
from eagle3_pipeline.serving.lease import hold_lease
from eagle3_pipeline.serving.record import ServerRecord, all_records
from eagle3_pipeline.serving.server import open_server
from eagle3_pipeline.serving.stopping import stop_server
from eagle3_pipeline.serving.watcher import stops_at, watch
from tests.serving.conftest import SpecMaker
from tests.serving.observe import freeze_watcher, use_server, wait_for


def test_a_server_that_nobody_uses_is_stopped_after_its_idle_time_and_the_watcher_ends(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(idle_timeout_s=1), tmp_path) as server:
        time.sleep(1.5)
        server.check_alive()  # held longer than the idle time
        left_at = time.monotonic()
    wait_for(lambda: list(all_records()) == [])
    assert time.monotonic() - left_at >= 1
    assert not server.record.alive()
    watcher = server.record.watcher
    assert watcher is not None
    wait_for(lambda: not watcher.alive())
    assert "was idle for 1 s" in server.log.with_suffix(".watcher.log").read_text()


def test_the_idle_time_of_a_server_whose_step_was_killed_counts_from_the_kill_for_all_who_ask(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    spec = make_spec(idle_timeout_s=2)
    step = multiprocessing.get_context("fork").Process(target=use_server, args=(spec, tmp_path, 60))
    step.start()
    wait_for(lambda: list(tmp_path.glob("pid-*")))
    (record,) = all_records()
    assert stops_at(record) - time.time() == pytest.approx(
        2, abs=0.1
    )  # in use: at the earliest in two seconds
    time.sleep(1.5)
    os.kill(step.pid or 0, signal.SIGKILL)
    step.join()
    killed_at = time.time()
    ends = stops_at(record)
    assert ends - killed_at == pytest.approx(2, abs=0.6)  # the watcher looks every 0.4 s
    wait_for(lambda: list(all_records()) == [])
    assert time.time() >= ends


def test_a_lease_just_before_the_end_puts_it_off(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(), tmp_path) as server:
        pass
    first = stops_at(server.record)
    time.sleep(0.05)
    with hold_lease((), server.record.fingerprint, "one more"):
        pass
    assert stops_at(server.record) > first


def test_a_watcher_that_cannot_stop_its_server_goes_on_watching(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "eagle3_pipeline")
    with open_server(make_spec(idle_timeout_s=1), tmp_path) as server:
        freeze_watcher(server.record)
    failures = [Busy("belongs to another user"), OSError("no room")]

    def stop(record: ServerRecord) -> None:
        if failures:
            raise failures.pop(0)
        stop_server(record)

    monkeypatch.setattr(watcher_module, "stop_server", stop)
    monkeypatch.setattr(watcher_module, "_AGAIN_S", 0.0)
    watch(server.record.path)
    assert not server.record.alive()
    assert list(all_records()) == []
    assert "Busy: belongs to another user. Looking again" in caplog.text
    assert "OSError: no room. Looking again" in caplog.text


def test_a_watcher_waits_for_its_server_as_long_as_the_starter_lives(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(idle_timeout_s=1), tmp_path) as server:
        early = replace(server.record, process=None)
        assert not watcher_module._look(write(early).path, early)
        assert server.record.process is not None
        assert server.record.process.alive()
        write(server.record)


def write(record: ServerRecord) -> ServerRecord:
    record.write()
    return record
