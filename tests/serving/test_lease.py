import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from eagle3_pipeline.serving import lease
from eagle3_pipeline.serving.lease import (
    hold_lease,
    hold_partition,
    holders,
    last_used,
    lease_names,
    note_use,
    try_hold,
)
from eagle3_pipeline.serving.process import pid_namespace
from tests.serving.observe import wait_for

context = multiprocessing.get_context("fork")


def hold(gpus: tuple[str, ...], fingerprint: str | None, held: Event, let_go: Event) -> None:
    with hold_lease(gpus, fingerprint, "another step"):
        held.set()
        let_go.wait(20)


def holder(gpus: tuple[str, ...], fingerprint: str | None) -> tuple[multiprocessing.Process, Event]:
    held, let_go = context.Event(), context.Event()
    process = context.Process(target=hold, args=(gpus, fingerprint, held, let_go))
    process.start()
    assert held.wait(10)
    return process, let_go  # type: ignore[return-value]


def can_hold(gpus: tuple[str, ...], fingerprint: str | None) -> bool:
    descriptors = [lease._try(name, fingerprint, "try") for name in lease_names(gpus)]
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)
    return None not in descriptors


def test_a_lease_is_shared_for_the_same_fingerprint_only() -> None:
    process, let_go = holder(("0", "1"), "a")
    assert can_hold(("0",), "a")
    assert not can_hold(("0",), "b")
    assert not can_hold(("1", "2"), None)
    assert can_hold(("2",), None)
    let_go.set()
    process.join()
    assert can_hold(("0", "1"), "b")


def test_a_lease_held_alone_is_shared_with_nobody() -> None:
    process, let_go = holder((), None)
    assert not can_hold((), "a")
    assert not can_hold((), None)
    let_go.set()
    process.join()
    assert can_hold((), None)


def test_the_last_sharer_keeps_it_shared_when_the_first_is_gone() -> None:
    first, let_first_go = holder((), "a")
    second, let_second_go = holder((), "a")
    let_first_go.set()
    first.join()
    assert not can_hold((), None)
    assert can_hold((), "a")
    let_second_go.set()
    second.join()
    assert can_hold((), None)


@pytest.mark.parametrize("fingerprint", ["a", None])
def test_kill_minus_nine_frees_a_lease(fingerprint: str | None) -> None:
    process, _ = holder(("0",), fingerprint)
    assert not can_hold(("0",), "b")
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert can_hold(("0",), "b")


def test_a_holders_file_torn_by_a_kill_keeps_others_out_but_not_for_ever(host_state: Path) -> None:
    process, let_go = holder((), "a")
    (host_state / "leases" / "cpu.holders").write_text('{"finger')
    assert not can_hold((), "a")
    let_go.set()
    process.join()
    assert can_hold((), "a")


def test_whoever_waits_says_what_for_and_who_holds_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "eagle3_pipeline")
    process, let_go = holder(("3",), None)
    threading.Timer(0.5, let_go.set).start()
    with hold_partition(("3",), "training of smollm2"):
        pass
    process.join()
    assert (
        f"training of smollm2 waits for gpu-3 since 0 s: held by another step (pid {process.pid}"
        in caplog.text
    )


def test_takers_of_several_gpus_in_any_order_never_block_each_other() -> None:
    def take(gpus: tuple[str, ...], name: str) -> None:
        for _ in range(5):
            with hold_lease(gpus, None, name):
                pass

    threads = [
        threading.Thread(target=take, args=(gpus, str(gpus)))
        for gpus in (("0", "1", "2"), ("2", "1"), ("1", "0"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_try_hold_takes_all_or_nothing() -> None:
    process, let_go = holder(("1",), "a")
    with try_hold(("0", "1"), "look") as free:
        assert not free
    assert can_hold(("0",), None)
    let_go.set()
    process.join()
    with try_hold(("0", "1"), "look") as free:
        assert free
        assert not can_hold(("0",), "a")


def test_the_last_use_is_now_while_held_and_the_moment_of_leaving_after() -> None:
    with hold_lease((), "a", "work"):
        assert time.time() - last_used(()) < 0.5
        time.sleep(0.3)
    left = time.time()
    wait_for(lambda: time.time() - left > 0.2)
    assert abs(last_used(()) - left) < 0.1


def test_the_last_use_of_a_holder_that_was_killed_is_when_it_was_seen_last() -> None:
    process, _ = holder(("0", "1"), "a")
    time.sleep(0.3)
    note_use(("0", "1"))
    seen = time.time()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    time.sleep(0.2)
    note_use(("0", "1"))  # free: no use
    assert abs(last_used(("0", "1")) - seen) < 0.1


def test_a_holder_in_another_container_stays_named(
    host_state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process, let_go = holder(("3",), None)
    file = host_state / "leases" / "gpu-3.holders"
    value = json.loads(file.read_text())
    assert value["holders"][0]["namespace"] == pid_namespace()
    value["holders"][0].update(namespace="pid:[1]", pid=2**22 + 1)
    file.write_text(json.dumps(value))
    assert "another step (pid 4194305 of another container, for " in str(holders(("3",))[0])
    let_go.set()
    process.join()


def test_every_user_may_use_leases_that_another_user_made(host_state: Path) -> None:
    with hold_lease((), None, "work"):
        pass
    assert (host_state.stat().st_mode & 0o7777, (host_state / "leases").stat().st_mode & 0o7777) == (
        0o1777,
        0o1777,
    )
    assert {path.stat().st_mode & 0o777 for path in (host_state / "leases").iterdir()} == {0o666}
