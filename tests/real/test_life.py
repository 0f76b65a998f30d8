"""The life of the real vLLM: attached to, stopped, cut short, killed, crashed; and what is left of it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from eagle3_pipeline.errors import ServerDied
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.serving.record import ServerRecord
from eagle3_pipeline.serving.server import open_server, running_servers, stop_servers
from eagle3_pipeline.serving.specification import generation_server
from eagle3_pipeline.target import make_target
from tests.models import make_deepseek
from tests.real.cycle import ask, live_once
from tests.real.step import ROOT, start_step
from tests.real.traces import Traces, processes_in
from tests.recipes import tiny_recipe
from tests.serving.observe import family_of, freeze_watcher, wait_for

pytestmark = pytest.mark.real

CYCLES = 3


@pytest.fixture(autouse=True)
def _no_other_server() -> Iterator[None]:
    """These tests begin without a server, and a test that fails leaves none to the next."""
    stop_servers(())
    yield
    stop_servers(())


def engine_core(record: ServerRecord) -> int | None:
    """The pid of a server's engine, None as long as it has none."""
    for pid in family_of(record):
        with contextlib.suppress(psutil.Error):
            if "VLLM::EngineCore" in " ".join(psutil.Process(pid).cmdline()):
                return pid
    return None


def test_a_server_is_attached_to_from_another_process_within_a_second_and_stopped_without_a_trace(
    real_recipe: Path, real_lineage: Lineage, tmp_path: Path
) -> None:
    for _ in range(CYCLES):
        cycle = live_once(real_recipe, real_lineage, tmp_path)
        assert cycle.to_attached < 1


def test_a_server_whose_step_was_interrupted_is_stopped_while_it_still_loads(
    real_recipe: Path, real_lineage: Lineage, tmp_path: Path
) -> None:
    traces = Traces(tmp_path)
    with start_step(real_recipe, real_lineage, tmp_path) as step:
        wait_for(lambda: any(engine_core(record) for record in running_servers()), 120)
        step.send_signal(signal.SIGINT)
        step.communicate(timeout=30)
    (record,) = running_servers()
    assert record.alive()
    assert not record.ready
    traces.see()
    began = time.monotonic()
    command = [sys.executable, "-m", "eagle3_pipeline.cli", "server", "stop"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    assert time.monotonic() - began < 10  # vLLM itself would go on loading until it serves
    assert running_servers() == []
    traces.assert_gone()


def test_a_server_killed_whole_or_in_part_is_told_and_replaced_and_nothing_of_it_stays(
    real_lineage: Lineage, tmp_path: Path
) -> None:
    spec, traces = generation_server(real_lineage), Traces(tmp_path)
    folders = [tmp_path / name for name in ("no-watcher", "no-engine", "watched")]
    with open_server(spec, folders[0]) as first:
        traces.see()
        freeze_watcher(first.record)
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: not first.record.alive())
        with pytest.raises(ServerDied, match=r"SIGKILL[\s\S]*killed from outside[\s\S]*startup complete"):
            first.check_alive()

    with open_server(spec, folders[1]) as second:
        assert second.pid != first.pid
        ask(second)
        traces.see()
        engine = engine_core(second.record)
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: not second.record.alive(), 30)
        with pytest.raises(ServerDied, match=r"a process of it was killed[\s\S]*engine core exited"):
            second.check_alive()

    with open_server(spec, folders[2]) as third:
        assert third.pid not in (first.pid, second.pid)
        ask(third)
        traces.see()
        assert processes_in(folders[0]) | processes_in(folders[1]) == {}
        assert processes_in(folders[2])
        os.kill(third.pid, signal.SIGKILL)
    wait_for(lambda: processes_in(tmp_path) == {}, 60)
    assert running_servers() == []
    traces.assert_gone()


def test_a_worker_that_crashes_at_the_first_request_is_told_and_nothing_of_the_server_stays(
    tmp_path: Path,
) -> None:
    """With expert parallelism vLLM's CPU backend gets ready, but its kernel knows no expert map.

    It takes the numbers of all experts for places in arrays of its own half. Of a few experts these places
    are still in the padding and nothing happens; of 256 they are in the results of the layer before.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    common = {
        "tensor_parallel": 2,
        "expert_parallel": True,
        "extra_env": {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))},
    }
    model = make_deepseek(tmp_path / "moe", layers=4, experts=256, experts_per_token=8)
    recipe = tiny_recipe(tmp_path / "recipe", model, server={"common": common})
    lineage = Lineage(load_recipe(str(recipe), recipe.parent), tmp_path / "storage")
    make_target(lineage)
    traces = Traces(tmp_path)
    with open_server(generation_server(lineage), tmp_path / "logs") as server:
        assert "(Worker_TP1_EP1 " in server.log.read_text()
        traces.see()
        with pytest.raises(httpx.HTTPError):
            ask(server)
        wait_for(lambda: not server.record.alive(), 60)
        with pytest.raises(ServerDied, match=r"crashed in native code[\s\S]*Segfault encountered"):
            server.check_alive()
    wait_for(lambda: processes_in(tmp_path) == {}, 60)
    assert running_servers() == []
    traces.assert_gone()
