import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.recipe.server import ServerSettings
from eagle3_pipeline.serving import lease, nvml, process, readiness
from eagle3_pipeline.serving.host_state import STATE_VARIABLE
from eagle3_pipeline.serving.record import all_records
from eagle3_pipeline.serving.specification import ServerSpec, served_name
from eagle3_pipeline.serving.stopping import stop_server

STAND_IN = Path(__file__).with_name("stand_in.py")
SpecMaker = Callable[..., ServerSpec]


@pytest.fixture(autouse=True)
def host_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Leases and records of this test alone. A process that is left behind fails the test, and is ended."""
    folder = tmp_path / "host-state"
    monkeypatch.setenv(STATE_VARIABLE, str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "nvml", lambda: None)  # whatever GPUs this machine has, or not
    monkeypatch.setattr(process, "_LEADER_S", 1.0)
    monkeypatch.setattr(process, "_FOLLOW_S", 0.3)
    monkeypatch.setattr(readiness, "_POLL_S", 0.05)
    monkeypatch.setattr(lease, "_POLL_S", 0.05)
    term, *kills = process._ROUNDS
    monkeypatch.setattr(process, "_ROUNDS", ((term[0], 0.5, None), *kills))
    yield folder
    for record in list(all_records()):
        stop_server(record)
    left = [one for one in psutil.process_iter(["cmdline"]) if _is_ours(one, folder)]
    for one in left:
        os.kill(one.pid, signal.SIGKILL)
    assert not left, f"left behind: {left}"


def _is_ours(process: psutil.Process, folder: Path) -> bool:
    # Watchers name the folder in their arguments and end within an instant of their SIGTERM.
    if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
        return False
    try:
        return process.environ().get(STATE_VARIABLE) == str(folder) and "watcher" not in str(
            process.info["cmdline"]
        )
    except psutil.Error:
        return False


@pytest.fixture
def make_spec(tmp_path: Path) -> SpecMaker:
    """A specification of a stand-in server: `behave` as in stand_in.py, settings by name."""

    def make(
        behave: str = "", partition: tuple[str, ...] = (), python: str = sys.executable, **settings: object
    ) -> ServerSpec:
        print_ = fingerprint([behave, partition, settings.get("max_num_seqs")])
        return ServerSpec(
            phase="generation",
            model=tmp_path,
            argv=(python, str(STAND_IN), "--behave", behave, "--served-model-name", served_name(print_)),
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            partition=partition,
            fingerprint=print_,
            settings=ServerSettings.model_validate({"start_timeout_s": 20, **settings}),
        )

    return make
