"""What a record says of its server, through its whole life, compared with what really runs."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest

from eagle3_pipeline.errors import ServerDied, ServerError, ServerNotReady, ServerRefused, ServerStopped
from eagle3_pipeline.serving.lease import all_holders, hold_lease, holders
from eagle3_pipeline.serving.record import ServerRecord, all_records
from eagle3_pipeline.serving.server import RunningServer, open_server, retire, running_servers, stop_servers
from eagle3_pipeline.serving.specification import ServerSpec
from tests.serving.conftest import SpecMaker
from tests.serving.observe import family_of, freeze_watcher, use_server, wait_for


def states() -> list[str]:
    return [record.state() for record in all_records()]


def test_absent_starting_ready_absent(make_spec: SpecMaker, tmp_path: Path) -> None:
    spec = make_spec("slow")
    assert states() == []
    step = multiprocessing.get_context("fork").Process(target=use_server, args=(spec, tmp_path, 60))
    step.start()
    wait_for(lambda: states() == ["starting"])
    wait_for(lambda: states() == ["ready"])
    step.kill()
    step.join()
    assert states() == ["ready"]
    stop_servers(())
    assert states() == []


@pytest.mark.parametrize(
    ("behave", "kind", "words"),
    [
        ("crash", ServerDied, "out of memory"),
        ("crash-late", ServerDied, "out of memory"),
        ("inner-limit", ServerRefused, "start_timeout_s, which sets that limit too"),
        ("hang", ServerNotReady, "raise server.generation.start_timeout_s"),
    ],
)
def test_a_start_that_fails_leaves_no_process_and_a_record_of_why_until_the_gpus_are_used_again(
    behave: str, kind: type[ServerError], words: str, make_spec: SpecMaker, tmp_path: Path
) -> None:
    limit_s = 1 if behave == "hang" else 20
    with pytest.raises(kind, match=words), open_server(make_spec(behave, start_timeout_s=limit_s), tmp_path):
        pass
    (record,) = all_records()
    assert (record.state(), record.failure) == ("failed", kind.__name__)
    assert words in record.reason
    assert family_of(record) == []
    assert running_servers() == []
    assert not record.scratch.exists()
    with open_server(make_spec(), tmp_path):
        assert states() == ["ready"]


def test_how_far_the_weights_were_is_in_the_message_of_a_late_crash(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with pytest.raises(ServerDied, match="18/20"), open_server(make_spec("crash-late"), tmp_path):
        pass


def test_a_server_that_was_killed_has_failed_whatever_its_record_says(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(), tmp_path) as server:
        freeze_watcher(server.record)
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not server.record.alive())
        (record,) = all_records()
        assert (record.stage, record.state()) == ("ready", "failed")


def test_the_watcher_keeps_why_a_server_died_when_no_step_was_there(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(idle_timeout_s=1), tmp_path) as server:
        pass
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: [record.failure for record in all_records()] == ["ServerDied"])
    assert server.record.watcher is not None
    wait_for(lambda: not server.record.watcher.alive())  # type: ignore[union-attr]


def hold_in_thread(spec: ServerSpec, folder: Path, enough: threading.Event) -> list[RunningServer]:
    found: list[RunningServer] = []

    def use() -> None:
        with open_server(spec, folder) as server:
            found.append(server)
            enough.wait(30)

    threading.Thread(target=use).start()
    wait_for(lambda: bool(found))
    return found


def test_a_server_in_use_is_drained_and_ends_with_its_last_user_and_takes_no_new_one(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    spec, enough = make_spec(idle_timeout_s=60), threading.Event()
    (first,) = hold_in_thread(spec, tmp_path, enough)
    assert retire(first.record) == "draining"
    assert states() == ["draining"]
    later: list[RunningServer] = []
    newcomer = threading.Thread(target=lambda: later.extend(hold_in_thread(spec, tmp_path, enough)))
    newcomer.start()
    time.sleep(0.3)
    first.check_alive()
    assert later == []
    enough.set()
    newcomer.join(30)
    assert later[0].pid != first.pid
    assert not first.record.alive()
    wait_for(lambda: holders(()) == [])


def test_a_drained_server_is_ended_by_its_watcher_when_nobody_else_comes(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(idle_timeout_s=60), tmp_path) as server:
        assert retire(server.record) == "draining"
    wait_for(lambda: states() == [], 20)


def test_an_idle_server_is_stopped_at_once_when_a_person_wants_it(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(), tmp_path) as server:
        pass
    assert retire(server.record) is None
    assert states() == []


def test_force_ends_a_server_in_use_and_its_users_are_told_and_do_not_try_again(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    with open_server(make_spec(), tmp_path) as server:
        assert retire(server.record, force=True) is None
        with pytest.raises(ServerStopped, match="stopped by hand while it was in use"):
            server.check_alive()
    assert not ServerStopped.retryable
    assert states() == ["failed"]


def test_force_ends_a_server_that_is_still_loading(make_spec: SpecMaker, tmp_path: Path) -> None:
    seen: list[BaseException] = []

    def start() -> None:
        try:
            with open_server(make_spec("hang"), tmp_path):
                pass
        except ServerError as error:
            seen.append(error)

    step = threading.Thread(target=start)
    step.start()
    wait_for(lambda: states() == ["starting"] and next(iter(all_records())).process is not None)
    (record,) = all_records()
    assert retire(record) == "starting"  # in use by the step that loads it
    assert retire(record, force=True) is None
    step.join(20)
    assert [type(error) for error in seen] == [ServerStopped]
    assert family_of(record) == []


def test_an_end_that_was_cut_short_is_finished_by_the_next_user(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(), tmp_path) as server:
        freeze_watcher(server.record)
    server.record.amend(stage="stopping")
    with open_server(make_spec(), tmp_path) as again:
        assert again.pid != server.pid


def test_changes_of_a_record_keep_those_of_others(make_spec: SpecMaker, tmp_path: Path) -> None:
    with open_server(make_spec(), tmp_path) as server:
        old: ServerRecord = server.record
        old.amend(stage="draining")
        assert old.amend(watcher=None).stage == "draining"
        assert next(iter(all_records())).watcher is None
        old.amend(watcher=old.watcher)


def test_the_holders_of_a_lease_are_known_while_they_hold_it(make_spec: SpecMaker, tmp_path: Path) -> None:
    spec = make_spec()
    with open_server(spec, tmp_path), hold_lease((), spec.fingerprint, "a second user"):
        purposes = [holder.purpose for holder in holders(())]
        assert purposes == [f"generation with {spec.served_name}", "a second user"]
        assert [(holder.lease, holder.pid, holder.here) for holder in all_holders()] == [
            ("cpu", os.getpid(), True)
        ] * 2
    assert holders(()) == []


def test_a_full_disk_under_the_log_is_named_and_no_other_cause_made_up(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: marker)
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    # The kernel's /dev/full answers every write with ENOSPC.
    (tmp_path / f"generation-now-{marker.hex[:6]}.log").symlink_to("/dev/full")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4096))
    with pytest.raises(ServerDied, match="the disk of its log is full"), open_server(make_spec(), tmp_path):
        pass
    assert states() == ["failed"]
