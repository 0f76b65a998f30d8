"""Memory that is left where a container has less than the machine."""

from pathlib import Path

import psutil
import pytest

from eagle3_pipeline import host_memory

GIB = 1 << 30


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("limit", "left"), [("max", None), (f"{8 * GIB}", 5 * GIB + GIB + 7 + 9)])
def test_the_limit_of_a_container_counts_without_pages_that_can_go(
    limit: str, left: int | None, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = psutil.virtual_memory()._replace(available=100 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{3 * GIB}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\nactive_file 7\nslab_reclaimable 9\n")
    assert host_memory.available_bytes() == (left or 100 * GIB)


def test_without_control_groups_the_machine_alone_counts(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = psutil.virtual_memory()._replace(available=3)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert host_memory.available_bytes() == 3
