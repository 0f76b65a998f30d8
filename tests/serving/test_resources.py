"""What the Dagster resources do with the servers, on stand-ins."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eagle3_pipeline.serving.server import open_server, running_servers
from resources import GpuPartitions, VllmServers, vllm_servers
from tests.serving.conftest import SpecMaker


def test_a_passed_audit_stops_the_idle_generation_server_and_no_other(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, extraction = make_spec(max_num_seqs=1), make_spec(max_num_seqs=2)
    monkeypatch.setattr(vllm_servers, "generation_server", lambda _, **__: generation)
    two_passes = SimpleNamespace(while_generating=False)
    lineage, elsewhere = (
        cast(
            Any,
            SimpleNamespace(
                recipe=SimpleNamespace(partitions=SimpleNamespace(extraction=gpus), extraction=two_passes)
            ),
        )
        for gpus in ((), ("GPU-5f",))
    )
    with open_server(generation, tmp_path):
        assert VllmServers().release_generation(lineage) == []  # in use
    assert VllmServers().release_generation(elsewhere) == []  # extraction needs other GPUs
    assert VllmServers().release_generation(lineage) == [generation.served_name]
    with open_server(extraction, tmp_path) as server:
        pass
    assert VllmServers().release_generation(lineage) == []
    server.check_alive()


def test_training_gets_its_gpus_without_idle_servers(make_spec: SpecMaker, tmp_path: Path) -> None:
    recipe: Any = SimpleNamespace(name="small", partitions=SimpleNamespace(training=()))
    with open_server(make_spec(), tmp_path):
        pass
    with GpuPartitions().training(recipe):
        assert running_servers() == []
