import os
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.serving.specification import generation_server
from tests.serving.test_specification import make_lineage


@pytest.mark.parametrize(
    ("cores", "settings", "binding"),
    [
        ({0, 1}, {"tensor_parallel": 2}, "0|1"),
        ({7, 2, 5, 3, 11}, {"data_parallel": 2}, "2,3|5,7"),
        (
            set(range(8)),
            {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2},
            "0|1|2|3|4|5|6|7",
        ),
        ({0, 1}, {}, None),
        ({0, 1}, {"tensor_parallel": 2, "extra_env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}, "nobind"),
    ],
)
def test_each_process_of_a_server_on_the_cpu_gets_cores_of_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: set[int],
    settings: dict[str, Any],
    binding: str | None,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    env = generation_server(make_lineage(tmp_path, server={"generation": settings})).env
    assert env.get("VLLM_CPU_OMP_THREADS_BIND") == binding


def test_a_binding_of_the_shell_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "1|0")
    spec = generation_server(make_lineage(tmp_path, server={"generation": {"tensor_parallel": 2}}))
    assert "VLLM_CPU_OMP_THREADS_BIND" not in spec.env


def test_more_processes_than_cores_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    settings = {"tensor_parallel": 2, "data_parallel": 2}
    with pytest.raises(RecipeError, match=r"= 4 processes on the CPU, .* 3 cores\. Make it at most 3\."):
        generation_server(make_lineage(tmp_path, server={"generation": settings}))
