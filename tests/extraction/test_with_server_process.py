from pathlib import Path

import pytest
import torch

from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.extraction import plan
from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.serving.server import open_server, stop_servers
from eagle3_pipeline.serving.specification import extraction_server
from eagle3_pipeline.shards.reader import ShardReader
from tests.extraction.build import audit, make_lineage
from tests.fakes.faults import write_control
from tests.fakes.heads import head_of
from tests.fakes.states import expected_states

PYTHON = Path(__file__).parent.parent / "fakes" / "python"


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "control.json"
    monkeypatch.setenv("FAKE_CONTROL", str(path))
    return path


@pytest.fixture
def lineage(tmp_path: Path, tiny_llama: Path) -> Lineage:
    facts = {"model_path": str(tiny_llama), "num_layers": 4, "hidden_size": 64, "vocab_size": 512}
    return audit(make_lineage(tmp_path, facts=facts, server={"python": PYTHON, "start_timeout_s": 60}))


def _extract(lineage: Lineage, told: list[str]) -> None:
    server = open_server(extraction_server(lineage, lineage.staging), lineage.logs)
    extract_shards(lineage, lineage.recipe.shards, server, lambda shard, manifest: told.append(shard))


def test_faults_of_a_server_process_are_met_and_the_next_call_goes_on(
    lineage: Lineage, control: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_ONE_IN", 10**9)  # captures none again, so that files can be counted
    write_control(control, late_states_seconds=0.05, busy_requests=2, retry_after="0", no_room_after=28)
    told: list[str] = []
    try:
        with pytest.raises(NotEnoughRoom, match="is full"):
            _extract(lineage, told)
        assert told == ["p10-s000"]
        write_control(control)
        _extract(lineage, told)
        assert told == ["p10-s000", "p10-s000", "p10-s001"]
        reader = ShardReader([lineage.hidden_state_shards(shard).folder for shard in lineage.recipe.shards])
        assert len(reader) == 20
        for index in range(len(reader)):
            sample = reader[index]
            expected = expected_states(sample["token_ids"].tolist(), (1, 2, 4), 64, head_of(tiny_llama))
            assert torch.equal(sample["hidden_states"].float(), torch.tensor(expected))
    finally:
        stop_servers(())
