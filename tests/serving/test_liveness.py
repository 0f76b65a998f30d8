import logging
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_pipeline.errors import ServerDied, ServerStalled
from eagle3_pipeline.serving import liveness
from eagle3_pipeline.serving.liveness import Progress
from eagle3_pipeline.serving.metrics import ServerMetrics, parse_metrics
from eagle3_pipeline.serving.record import all_records
from eagle3_pipeline.serving.server import open_server
from tests.serving.conftest import SpecMaker
from tests.serving.observe import family_of, wait_for

NOTHING = parse_metrics("")
WORKING = replace(NOTHING, running=3, waiting=2, generation_tokens=10)


def looks(readings: list[ServerMetrics | None], limit_s: float = 30) -> list[bool]:
    """Whether it is called stalled at each reading, one every 10 s."""
    progress = Progress(limit_s)
    return [progress.look(reading, 10.0 * number) is not None for number, reading in enumerate(readings)]


def test_requests_without_a_token_for_the_limit_are_a_stall() -> None:
    assert looks([WORKING] * 5) == [False, False, False, True, True]


@pytest.mark.parametrize("change", [{"generation_tokens": 11}, {"prompt_tokens": 5}])
def test_each_token_starts_the_time_again(change: dict[str, int]) -> None:
    assert not any(looks([WORKING, WORKING, WORKING, replace(WORKING, **change)] + [WORKING] * 2))


def test_a_server_without_requests_is_never_stalled() -> None:
    assert not any(looks([NOTHING] * 9))


def test_the_time_counts_from_the_first_request_and_not_from_the_last_token_before_it() -> None:
    assert looks([NOTHING] * 5 + [replace(NOTHING, running=1)] * 4) == [False] * 7 + [True] * 2


def test_waiting_requests_alone_count_as_requests() -> None:
    assert looks([replace(NOTHING, waiting=1)] * 5)[-1]


def test_metrics_without_an_answer_for_the_limit_are_a_stall_too() -> None:
    assert looks([WORKING, None, None, None]) == [False, False, False, True]
    assert looks([None] * 4)[-1]


def test_preemptions_and_the_cache_are_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eagle3_pipeline")
    busy = [
        replace(WORKING, generation_tokens=1000 * number, kv_cache_usage=0.5, preemptions=7)
        for number in range(13)
    ]
    looks(busy)
    told = [record.getMessage() for record in caplog.records]
    words = "the server has 3 running and 2 waiting requests, 100 tokens/s, KV cache 50 % used, 7 preemptions"
    assert told == [words, words]


def test_a_stalled_server_is_ended_and_its_users_and_its_record_say_why(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    spec = make_spec("stalled", stall_timeout_s=1)
    with open_server(spec, tmp_path) as server:
        wait_for(lambda: not server.record.alive())
        wait_for(lambda: family_of(server.record) == [])
        with pytest.raises(ServerStalled, match=r"1 running and 0 waiting requests got no token for 1 s"):
            server.check_alive()
        assert ServerStalled.retryable
    (record,) = all_records()
    assert record.state() == "failed"
    assert "raise server.generation.stall_timeout_s (now 1)" in record.reason
    with open_server(make_spec("stalled", stall_timeout_s=60), tmp_path) as again:
        assert again.pid != server.pid
        assert [one.state() for one in all_records()] == ["ready"]


def test_a_server_that_answers_nothing_at_all_is_stalled(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(stall_timeout_s=1), tmp_path) as server:
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("eagle3_pipeline.serving.metrics._TIMEOUT", 0.2)
            wait_for(lambda: not server.record.alive(), 20)
        with pytest.raises(ServerStalled, match="/metrics gave no answer"):
            server.check_alive()


def test_a_server_that_died_is_no_stall(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(stall_timeout_s=1), tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not any("liveness" in thread.name for thread in threading.enumerate()))
        with pytest.raises(ServerDied, match="SIGKILL"):
            server.check_alive()


def test_leaving_a_server_ends_the_watching(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_LOOK_EVERY_S", 600.0)
    with open_server(make_spec(stall_timeout_s=6000), tmp_path):
        assert any("liveness" in thread.name for thread in threading.enumerate())
    assert not any("liveness" in thread.name for thread in threading.enumerate())
