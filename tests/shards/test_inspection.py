import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_pipeline.cli import main
from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.shards.consumption import mark_consumed
from eagle3_pipeline.shards.format import read_header
from eagle3_pipeline.shards.inspection import inspect_shards
from tests.shards.build import LAYOUT, flip, invent, make_shard


def test_a_shard_and_a_folder_of_shards_are_described_with_what_matters(tmp_path: Path) -> None:
    make_shard(tmp_path, [invent(3, 0), invent(4, 1)], shard="p4-s000")
    make_shard(tmp_path, [invent(5, 2)], shard="p4-s001")
    one = inspect_shards(tmp_path / "p4-s000")
    assert "2 samples  7 tokens" in one
    assert "layers [2, 5, 8] x 4 bf16" in one
    assert "format 2, layer ids by input-of-layer, the last one before the final norm, kept all" in one
    assert "p4-s000-0 to p4-s000-1, of 3 to 4 tokens" in one
    assert "1 not_finite quarantined" in one
    assert 'scales: {"2": 0.1, "5": 0.2, "8": 0.4}' in one
    assert one.endswith("sizes, headers and offsets right")
    both = inspect_shards(tmp_path, verify=True)
    assert one.replace("sizes, headers and offsets", "checksums") in both
    assert both.count("checksums right") == 2


def test_fp8_and_a_last_layer_on_completions_are_said(tmp_path: Path) -> None:
    layout = replace(LAYOUT, precision="fp8", kept="trained")
    make_shard(tmp_path, [invent(3, 0), invent(4, 1)], layout=layout)
    said = inspect_shards(tmp_path)
    assert "layers [2, 5, 8] x 4 fp8" in said
    assert "kept trained" in said
    assert "last layer on 4 tokens of completions" in said


def test_a_consumed_shard_is_described_by_its_manifest(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(3, 0)])
    mark_consumed(folder, "c" * 64, 3)
    said = inspect_shards(tmp_path, verify=True)
    assert "states deleted: checkpoint cccccccccccc learned from them in turn 3" in said
    assert "1 not_finite quarantined" in said


def test_verify_finds_a_changed_byte_that_sizes_do_not_show(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(3, 0)])
    flip(folder / "part-00000.safetensors", -1)
    inspect_shards(folder)
    with pytest.raises(DamagedFile, match=r"checksum .* Delete this file and materialise"):
        inspect_shards(folder, verify=True)


def test_offsets_that_do_not_rise_are_found_without_verify(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(3, 0), invent(4, 1)])
    part = folder / "part-00000.safetensors"
    flip(part, read_header(part).tensors["offsets"][0] + 8 + 3)
    with pytest.raises(DamagedFile, match="its offsets do not rise from 0 to 7"):
        inspect_shards(folder)


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = make_shard(tmp_path, [invent(3, 0)])
    assert main(["shards", "inspect", str(folder), "--verify"]) == 0
    assert "checksums right" in capsys.readouterr().out


def test_no_shard_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="no hidden-state shard"):
        inspect_shards(tmp_path)
    with pytest.raises(MissingInput, match="no folder"):
        inspect_shards(tmp_path / "x")


def test_inspecting_and_planning_never_load_torch() -> None:
    code = (
        "import sys; import eagle3_pipeline.shards.inspection, eagle3_pipeline.shards.repair;"
        "import eagle3_pipeline.extraction.extraction;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'httpx', 'vllm', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
