"""Disks, memory of the CPU, limits of processes."""

import resource
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from eagle3_pipeline.doctor import Finding, Mark, disks, limits, partitions
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.room import expected_fits, memory_wanted
from eagle3_pipeline.samples.checkpoint_bytes import checkpoint_bytes
from tests.doctor.conftest import LineageMaker
from tests.records import process_of_a_server, write_record

GIB = 2**30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    usage = namedtuple("usage", "free")

    def set_free(*, disk: int = 1 << 60, memory: int = 1 << 60) -> None:
        memory_now = SimpleNamespace(available=memory, total=24 * GIB)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free=disk))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory_now)

    return set_free


def make_target(lineage: Lineage) -> None:
    place = lineage.target_model()
    place.folder.mkdir(parents=True)
    place.finish([], {"model_fingerprint": "m", "hidden_size": 4096, "bytes": GIB})


def test_a_full_disk_is_a_problem_named_with_its_purpose_and_the_way_out(free) -> None:
    free(disk=GIB)
    assert [one.mark for one in disks.disks()] == [Mark.OK] * 4
    free(disk=GIB - 1)
    found = list(disks.disks())
    assert [one.mark for one in found] == [Mark.PROBLEM] * 4
    assert "--shm-size" in found[0].advice
    assert "VLLM_CACHE_ROOT" in found[2].advice


def test_a_folder_that_this_user_cannot_write_to_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, free, tmp_path: Path
) -> None:
    free()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "elsewhere" / "cache"))
    monkeypatch.setattr(disks.os, "access", lambda folder, _: folder != tmp_path)
    assert "cannot be written to" in list(disks.disks())[2].what


def test_the_storage_root_is_judged_by_what_is_still_to_be_written(free, make_lineage: LineageMaker) -> None:
    lineage = make_lineage()
    free()
    (found,) = disks.storage(lineage)
    assert (found.mark, "known when target_model is made" in found.what) == (Mark.OK, True)
    make_target(lineage)
    short, long = (fit.wave_plan.needed for fit in expected_fits(lineage))
    marks = []
    kept = checkpoint_bytes(lineage)  # more than storage.keep_free_gib
    for disk in (kept + long, kept + short - 1):
        free(disk=disk)
        (found,) = disks.storage(lineage)
        marks.append(found.mark)
    assert marks == [Mark.OK, Mark.PROBLEM]
    assert not (lineage.folder / "hidden_state_shards").exists()


def test_states_that_fit_only_when_completions_are_short_are_a_note(free, make_lineage: LineageMaker) -> None:
    plan = {"count": 4096, "per_shard": 4096}
    lineage = make_lineage(prompts=plan)
    make_target(lineage)
    short, long = (fit.wave_plan.needed for fit in expected_fits(lineage))
    assert GIB < short < long
    kept = checkpoint_bytes(lineage)
    free(disk=kept + short)
    (found,) = disks.storage(lineage)
    assert (found.mark, "sample_audit decides" in found.advice) == (Mark.NOTE, True)
    free(disk=kept + short - 1)
    (found,) = disks.storage(lineage)
    assert (found.mark, "extraction.precision: fp8" in found.advice) == (Mark.PROBLEM, True)


def test_once_the_audit_stands_only_the_disk_itself_is_looked_at(
    free, make_lineage: LineageMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = make_lineage()
    make_target(lineage)
    free(disk=GIB)
    assert [one.mark for one in disks.storage(lineage)] == [Mark.PROBLEM]
    monkeypatch.setattr(disks, "is_audited", lambda lineage: True)
    assert [one.mark for one in disks.storage(lineage)] == [Mark.OK]


def test_memory_on_the_cpu_is_compared_with_what_a_server_takes(free, make_lineage: LineageMaker) -> None:
    lineage = make_lineage()

    def look() -> Finding:
        (found,) = partitions.partitions(lineage)
        return found

    free(memory=GIB)
    assert "known when target_model is made" in look().what
    make_target(lineage)
    assert look().mark == Mark.PROBLEM
    free(memory=memory_wanted(lineage.recipe, GIB))
    assert look().mark == Mark.OK
    free(memory=GIB)
    with process_of_a_server() as process:
        write_record(process)
        assert (look().mark, "holds some of it" in look().what) == (Mark.OK, True)


@pytest.mark.parametrize(
    ("limit", "hard", "soft", "words"),
    [
        (resource.RLIMIT_NOFILE, 65536, 600, "open files: 600 allowed, 712 wanted with 200 requests"),
        (resource.RLIMIT_NPROC, 65536, 40, "processes: 40 allowed"),
    ],
)
def test_a_limit_below_what_a_run_takes_is_a_problem_with_the_command_that_raises_it(
    limit: int, hard: int, soft: int, words: str, monkeypatch: pytest.MonkeyPatch, make_lineage: LineageMaker
) -> None:
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(
        limits.resource, "getrlimit", lambda which: (soft, hard) if which == limit else (infinity, infinity)
    )
    found = list(limits.limits(make_lineage(generation={"concurrency": 200})))
    (bad,) = [one for one in found if one.mark == Mark.PROBLEM]
    assert words in bad.what
    assert "`ulimit -" in bad.advice


def test_locked_memory_matters_only_where_several_gpus_talk(
    monkeypatch: pytest.MonkeyPatch, make_lineage: LineageMaker
) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    on_cpu = list(limits.limits(make_lineage()))[-1]
    assert (on_cpu.mark, on_cpu.what) == (Mark.OK, "locked memory: 8 MiB")
    two = make_lineage(partitions={"generation": "0-1"}, server={"generation": {"data_parallel": 2}})
    assert list(limits.limits(two))[-1].mark == Mark.NOTE


def test_a_folder_of_prompts_and_replies_that_all_may_read_is_a_note(make_lineage: LineageMaker) -> None:
    lineage = make_lineage()
    lineage.folder.mkdir(mode=0o700, parents=True)
    assert not list(disks.privacy(lineage))
    lineage.folder.chmod(0o755)
    (found,) = disks.privacy(lineage)
    assert (found.mark, found.advice) == (Mark.NOTE, f"If they are private: `chmod 700 {lineage.folder}`.")
