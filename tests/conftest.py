"""What every test gets: storage and host state of its own, and a look at the end for servers left behind."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.models import make_llama

_SESSION_MARK = "EAGLE3_TEST_SESSION"


@pytest.fixture(autouse=True)
def _own_state(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """EAGLE3_HOST_STATE and EAGLE3_STORAGE in a folder of this test; one for all tests of the real vLLM.

    Those share their servers, which take half a minute to start.
    """
    is_real = request.node.get_closest_marker("real") is not None
    folder = request.getfixturevalue("real_state") if is_real else tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_HOST_STATE", str(folder / "host"))
        patch.setenv("EAGLE3_STORAGE", str(folder / "storage"))
        yield


@pytest.fixture(scope="session")
def real_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of host state and storage for all tests of the real vLLM."""
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama of half a megabyte, made once."""
    return make_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(autouse=True, scope="session")
def _no_server_left() -> Iterator[None]:
    """Name the stand-in's Python, mark every process that the tests start, and fail if one outlives them."""
    mark = f"{os.getpid()}-{psutil.Process().create_time():.0f}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_PYTHON", sys.executable)
        patch.setenv(_SESSION_MARK, mark)
        yield
    left = _servers(mark)
    described = [f"{process.pid} {' '.join(process.cmdline())[:150]}" for process in left]
    for process in left:
        process.kill()
    if described:
        pytest.fail("server processes outlived the tests (and were killed):\n  " + "\n  ".join(described))


def _servers(mark: str) -> list[psutil.Process]:
    """Processes that inherited the mark, which only what these tests started can have."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(_SESSION_MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    # A process that is just ending is none that was left behind.
    left: list[psutil.Process] = psutil.wait_procs(found, timeout=3)[1]
    return left
