"""A whole job with `concurrency: auto` on the stand-in as a process: what holds at any speed of the machine.

What the search finds is tested in virtual time, in test_climb.py.
"""

from pathlib import Path

import pytest

from eagle3_pipeline.generation import climb, concurrency
from eagle3_pipeline.generation.collection import collect_samples
from tests.fakes.process import SERVED_NAME, stand_in
from tests.generation.chat_server import ChatServer
from tests.generation.world import make_lineage


def test_a_job_with_auto_makes_all_samples_and_shows_in_each_shard_what_it_did(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_EVERY_S_AT_REST", "_EVERY_S_IN_SEARCH"):
        monkeypatch.setattr(concurrency, name, 0.1)
    monkeypatch.setattr(climb, "_LEAST_S", 0.2)
    monkeypatch.setattr(climb, "_LONGEST_INTAKE", 3)
    generation = {"concurrency": "auto", "max_completion_tokens": 64}
    lineage = make_lineage(tmp_path, [1] * 240, 120, generation=generation)
    with stand_in(tmp_path / "server", tiny_llama, "--max-num-seqs", "40", seconds_per_token=0.01) as fake:
        server = ChatServer(str(fake.client.base_url).rstrip("/"), SERVED_NAME)
        made = collect_samples(lineage, lineage.recipe.shards, server.open, lambda shard, manifest: None)
    assert [manifest.facts["samples"] for manifest in made] == [120, 120]
    for manifest in made:
        history = manifest.facts["server_history"]
        assert 0 < len(history["seconds"]) <= 100
        assert 0 < max(history["running"]) <= 40
        assert max(history["tokens_per_second"]) > 0
        assert min(history["limit"]) >= 1
        assert max(history["limit"]) <= lineage.recipe.generation.most_in_flight
