"""A whole job with `concurrency: auto` on the stand-in as a process."""

from pathlib import Path

import pytest

from eagle3_pipeline.generation import climb, concurrency
from eagle3_pipeline.generation.collection import collect_samples
from tests.fakes.process import SERVED_NAME, stand_in
from tests.generation.chat_server import ChatServer
from tests.generation.world import make_lineage


def test_a_job_finds_its_number_and_shows_in_each_shard_what_it_did(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "_EVERY_S", 0.1)
    monkeypatch.setattr(concurrency, "_EVERY_S_IN_SEARCH", 0.1)
    monkeypatch.setattr(climb, "_LEAST_S", 0.2)
    monkeypatch.setattr(climb, "_LONGEST_INTAKE", 3)
    generation = {"concurrency": "auto", "max_completion_tokens": 64}
    lineage = make_lineage(tmp_path, [1] * 240, 120, generation=generation)
    with stand_in(tmp_path / "server", tiny_llama, "--max-num-seqs", "40", seconds_per_token=0.01) as fake:
        server = ChatServer(str(fake.client.base_url).rstrip("/"), SERVED_NAME)
        made = collect_samples(lineage, lineage.recipe.shards, server.open, lambda shard, manifest: None)
    assert sum(manifest.facts["samples"] for manifest in made) == 240
    for manifest in made:
        history = manifest.facts["server_history"]
        assert 0 < len(history["seconds"]) <= 100
        assert max(history["running"]) <= 40
        assert max(history["tokens_per_second"]) > 500
    limits = made[0].facts["server_history"]["limit"] + made[1].facts["server_history"]["limit"]
    # 64 were tried, and left again for the queue of 24: 40 that run, and 2 that wait for the next place.
    assert max(limits) == 64
    assert limits[-1] <= 42
