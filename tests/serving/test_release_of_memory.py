"""The script that measures memory on a GPU, as far as it goes without one."""

import json
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.gpu import release_of_memory
from eagle3_pipeline.serving import gpu_memory, nvml
from eagle3_pipeline.serving.nvml import Gpu
from eagle3_pipeline.serving.server import running_servers
from tests.recipes import FAKE_PYTHON
from tests.serving.recorded_nvml import recorded

RUNNING, IDLE = (recorded("eight-h200")[index] for index in (0, 3))


class Simulated:
    """A GPU whose memory is in use while a server of ours runs."""

    def gpus(self) -> tuple[Gpu, ...]:
        return (RUNNING,) if any(server.alive() for server in running_servers()) else (emptied(RUNNING),)

    def driver(self) -> str:
        return "580.105.08"


def emptied(gpu: Gpu) -> Gpu:
    return Gpu(gpu.index, gpu.uuid, gpu.name, gpu.total_bytes, IDLE.free_bytes, ())


def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release_of_memory.main([str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "no GPU here: NVML shows none. Run this on a machine with GPUs.\n"


def test_it_prints_the_bytes_in_use_and_records_the_seconds_of_each_cycle(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvml, "nvml", Simulated)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_memory, "_POLL_S", 0.05)
    monkeypatch.setattr(release_of_memory, "_AFTER_S", 0.0)
    options = ["--python", str(FAKE_PYTHON), "--cycles", "2", "--hold-s", "1.2"]
    assert release_of_memory.main([str(tiny_llama), *options]) == 0
    assert "running   [126.48] GiB in use" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "gpu-release-of-memory.json").read_text())["numbers"]
    assert numbers["gpus"] == ["NVIDIA H200"]
    assert len(numbers["cycles"]) == 2
    for cycle in numbers["cycles"]:
        assert cycle["gib_in_use"] == {"before": [0.6], "running": [126.48], "after": [0.6]}
        assert 0 < cycle["seconds_from_stop_to_memory_back"] < 10
