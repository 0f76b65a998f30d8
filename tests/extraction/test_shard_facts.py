"""What the manifest of a shard says of the run that finished it."""

import time
from pathlib import Path

import pytest

from eagle3_pipeline.errors import ServerDied
from eagle3_pipeline.extraction.extraction import extract_shards
from tests.extraction.build import PER_SHARD, PROOF, StandIn, audit, invent, make_lineage


def test_the_speed_of_a_resumed_shard_is_that_of_the_tokens_of_its_last_run(tmp_path: Path) -> None:
    samples = [invent(0, index) for index in range(PER_SHARD)]
    server, lineage = StandIn(), audit(make_lineage(tmp_path, [samples]))
    shard = lineage.recipe.shards[0]

    def die_late(number: int, ids: list[int]) -> None:
        if number >= PROOF and ids[1] == 7:
            time.sleep(0.2)  # the samples before this one reach their parts
            server.dead = True

    def run() -> None:
        extract_shards(lineage, [shard], server.open(lineage.staging), lambda shard, made: None)

    server.on_request = die_late
    with pytest.raises(ServerDied):
        run()
    assert list(lineage.hidden_state_shards(shard).folder.glob("part-*"))
    server.on_request, server.dead = (lambda number, ids: None), False
    run()
    facts = lineage.hidden_state_shards(shard).require().facts
    assert facts["tokens"] == sum(len(sample.token_ids) for sample in samples)
    assert (
        facts["captured_tokens"] == sum(map(len, set(map(tuple, server.requests[PROOF:])))) < facts["tokens"]
    )
