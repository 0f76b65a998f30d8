"""`eagle3 server` and `eagle3 status`, in this process, on stand-ins."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eagle3_pipeline.cli import main, server
from eagle3_pipeline.errors import ServerStopped
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.serving import specification
from eagle3_pipeline.serving.lease import hold_lease
from eagle3_pipeline.serving.record import ServerRecord, all_records
from eagle3_pipeline.serving.server import RunningServer, open_server
from eagle3_pipeline.serving.specification import ServerSpec
from eagle3_pipeline.target import make_target
from tests.recipes import tiny_recipe
from tests.serving.conftest import SpecMaker
from tests.serving.observe import wait_for


@contextmanager
def in_use(spec: ServerSpec, folder: Path) -> Iterator[RunningServer]:
    """A server that another thread uses."""
    found: list[RunningServer] = []
    enough = threading.Event()

    def use() -> None:
        with open_server(spec, folder) as running:
            found.append(running)
            enough.wait(30)

    user = threading.Thread(target=use)
    user.start()
    wait_for(lambda: bool(found))
    try:
        yield found[0]
    finally:
        enough.set()
        user.join(30)


def recorded() -> list[ServerRecord]:
    return list(all_records())


# --- start


def test_start_waits_until_the_server_is_ready_says_where_it_is_and_finds_it_again(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    make_target(Lineage(load_recipe(str(recipe), tmp_path), server.lineage_of(str(recipe)).storage_root))
    assert main(["server", "start", "--recipe", str(recipe)]) == 0
    shown = capsys.readouterr().out
    (record,) = recorded()
    assert record.state() == "ready"
    for words in (f"{record.base_url}/v1", record.served_name, record.log, "stops        by itself at "):
        assert words in shown
    assert main(["server", "start", "--recipe", str(recipe)]) == 0
    assert recorded() == [record]


def test_start_without_a_target_says_what_to_make_first(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    assert main(["server", "start", "--recipe", str(recipe)]) == 2
    assert "target_model is not made yet" in capsys.readouterr().err


@pytest.mark.parametrize("phase", ["generation", "extraction", "evaluation"])
def test_start_takes_the_server_of_the_phase(
    phase: str,
    tmp_path: Path,
    tiny_llama: Path,
    make_spec: SpecMaker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []

    def specify(name: str) -> ServerSpec:
        asked.append(name)
        return make_spec()

    for name in ("generation", "extraction", "evaluation"):
        monkeypatch.setattr(specification, f"{name}_server", lambda *_, name=name, **__: specify(name))
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    assert main(["server", "start", "--recipe", str(recipe), "--phase", phase]) == 0
    assert asked == [phase]
    assert ("without a draft, for none is trained yet" in capsys.readouterr().out) == (phase == "evaluation")


def test_an_interrupted_start_says_that_the_server_goes_on_loading(
    tmp_path: Path,
    tiny_llama: Path,
    make_spec: SpecMaker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(specification, "generation_server", lambda _, **__: make_spec("hang"))
    monkeypatch.setattr("eagle3_pipeline.serving.server.wait_until_ready", interrupt)
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    assert main(["server", "start", "--recipe", str(recipe)]) == 130
    assert "eagle3 server stop ends it" in capsys.readouterr().out
    assert [record.state() for record in recorded()] == ["starting"]
    assert main(["server", "stop"]) == 0
    assert recorded() == []


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# --- stop


def test_stop_ends_idle_servers(
    make_spec: SpecMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_server(make_spec(), tmp_path):
        pass
    assert main(["server", "stop"]) == 0
    assert ": stopped\n" in capsys.readouterr().out
    assert recorded() == []
    assert main(["server", "stop"]) == 0
    assert capsys.readouterr().out == "no server of ours runs on this machine\n"


def test_stop_names_who_uses_a_server_and_lets_them_finish(
    make_spec: SpecMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec(idle_timeout_s=1)
    with in_use(spec, tmp_path) as running:
        assert main(["server", "stop"]) == 0
        shown = capsys.readouterr().out
        assert f"in use by generation with {spec.served_name} (pid " in shown
        assert "is stopped when that is done" in shown
        running.check_alive()
        main(["server", "status"])
        shown = capsys.readouterr().out
        assert ": draining, started " in shown
        assert "stops by itself with its last use" in shown
    wait_for(lambda: recorded() == [], 20)


def test_stop_by_force_ends_a_server_in_use(
    make_spec: SpecMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with in_use(make_spec(), tmp_path) as running:
        assert main(["server", "stop", "--force"]) == 0
        assert "stopped, while it was used by generation with" in capsys.readouterr().out
        with pytest.raises(ServerStopped):
            running.check_alive()


def test_stop_clears_up_what_a_dead_server_left(
    make_spec: SpecMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with in_use(make_spec(), tmp_path):
        main(["server", "stop", "--force"])
    (record,) = recorded()
    assert record.state() == "failed"
    main(["server", "status"])
    assert ": failed, started " in capsys.readouterr().out
    assert main(["server", "stop"]) == 0
    assert "was dead; what it left is cleared up" in capsys.readouterr().out
    assert recorded() == []


# --- status


def test_status_shows_state_gpus_users_and_when_each_server_stops_and_who_holds_which_gpus(
    make_spec: SpecMaker, tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    busy, idle = make_spec(partition=("0",)), make_spec(max_num_seqs=2, partition=("1",))
    with open_server(idle, tmp_path):
        pass
    with in_use(busy, tmp_path), hold_lease((), None, "training of tiny"):
        main(["server", "status"])
        shown = capsys.readouterr().out
        assert main(["status", "--recipe", str(recipe)]) == 0
        assert capsys.readouterr().out.endswith(f"\n\n{shown}")
    assert f"generation server {busy.served_name} on GPUs 0 (pid " in shown
    assert ": ready, started " in shown
    assert f"used by generation with {busy.served_name} (pid " in shown
    assert "after its last use" in shown
    assert f"generation server {idle.served_name} on GPUs 1 (pid " in shown
    assert "stops by itself at " in shown
    assert f"gpu-0 is held by generation with {busy.served_name} (pid " in shown
    assert "cpu is held by training of tiny (pid " in shown
    assert "gpu-1 is held" not in shown
