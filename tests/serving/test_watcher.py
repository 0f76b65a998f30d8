import time
from pathlib import Path

from eagle3_pipeline.serving.record import all_records
from eagle3_pipeline.serving.server import open_server
from tests.serving.conftest import SpecMaker
from tests.serving.test_server import wait_for


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
