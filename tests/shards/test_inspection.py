import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.shards.inspection import inspect_shards
from tests.shards.build import invent, make_shard


def test_a_shard_and_a_folder_of_shards_are_described_with_what_matters(tmp_path: Path) -> None:
    make_shard(tmp_path, [invent(3, 0), invent(4, 1)], shard="p4-s000")
    make_shard(tmp_path, [invent(5, 2)], shard="p4-s001")
    one = inspect_shards(tmp_path / "p4-s000")
    assert "2 samples  7 tokens" in one
    assert "layers [2, 5, 8] x 4 bf16" in one
    assert "1 not_finite quarantined" in one
    both = inspect_shards(tmp_path, verify=True)
    assert one in both.replace(", checksums right", "")
    assert both.count("checksums right") == 2


def test_verify_finds_a_changed_byte_that_sizes_do_not_show(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(3, 0)])
    part = folder / "part-00000.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    inspect_shards(folder)
    with pytest.raises(DamagedFile, match="checksum"):
        inspect_shards(folder, verify=True)


def test_no_shard_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="no hidden-state shard"):
        inspect_shards(tmp_path)
    with pytest.raises(MissingInput, match="no folder"):
        inspect_shards(tmp_path / "x")


def test_inspecting_and_planning_never_load_torch() -> None:
    code = (
        "import sys; import eagle3_pipeline.shards.inspection, eagle3_pipeline.extraction.extraction;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'httpx', 'vllm', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
