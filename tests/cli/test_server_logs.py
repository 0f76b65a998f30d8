"""`eagle3 server logs`: which log is meant, and following it to the end."""

import io
import os
import sys
import threading
from pathlib import Path

import pytest

from eagle3_pipeline.cli import main
from eagle3_pipeline.serving.server import open_server, stop_servers
from tests.recipes import tiny_recipe
from tests.records import process_of_a_server, write_record
from tests.serving.conftest import SpecMaker
from tests.serving.observe import wait_for


def test_the_log_of_the_running_server_is_printed_as_it_is(
    make_spec: SpecMaker, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with open_server(make_spec(), tmp_path) as server:
        pass
    capsysbinary.readouterr()
    assert main(["server", "logs"]) == 0
    assert capsysbinary.readouterr().out == server.log.read_bytes()


def test_without_a_server_it_says_how_to_see_the_last_log_of_a_recipe(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["server", "logs"]) == 2
    assert "eagle3 server logs --recipe NAME" in capsys.readouterr().err
    recipe = tiny_recipe(tmp_path, tiny_llama)
    assert main(["server", "logs", "--recipe", str(recipe)]) == 2
    assert "none was started for this recipe yet" in capsys.readouterr().err
    logs = Path(os.environ["EAGLE3_STORAGE"]) / "tiny" / "logs"
    logs.mkdir(parents=True)
    for number, name in enumerate(("generation-1.log", "extraction-2.log", "extraction-2.watcher.log")):
        (logs / name).write_text(f"{name} is this\n")
        os.utime(logs / name, (number, number))
    assert main(["server", "logs", "--recipe", str(recipe), "-f"]) == 0  # nothing runs, so it ends
    assert capsys.readouterr().out == "extraction-2.log is this\n"


def test_one_of_several_servers_is_chosen_by_phase_or_served_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with process_of_a_server() as process:
        for phase in ("generation", "extraction"):
            log = tmp_path / f"{phase}.log"
            log.write_text(f"of {phase}\n")
            record = write_record(process, phase=phase, log=str(log))
        assert main(["server", "logs"]) == 2
        assert "2 servers on this machine; name one of them" in capsys.readouterr().err
        assert main(["server", "logs", "generation"]) == 0
        assert main(["server", "logs", record.served_name]) == 0
        assert capsys.readouterr().out == "of generation\nof extraction\n"
        assert main(["server", "logs", "evaluation"]) == 2
        Path(record.log).unlink()
        assert main(["server", "logs", "extraction"]) == 2
        assert "it was deleted" in capsys.readouterr().err


def test_following_shows_what_comes_and_ends_with_the_server(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_server(make_spec(), tmp_path) as server:
        pass
    shown = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", shown)
    follower = threading.Thread(target=main, args=(["server", "logs", "-f"],))
    follower.start()
    wait_for(lambda: b"loading weights" in shown.buffer.getvalue())
    with server.log.open("a") as log:
        log.write("something new\n")
    wait_for(lambda: b"something new" in shown.buffer.getvalue())
    stop_servers(())
    follower.join(10)
    assert not follower.is_alive()
    assert shown.buffer.getvalue() == server.log.read_bytes()
