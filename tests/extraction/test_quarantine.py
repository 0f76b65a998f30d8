"""How many unusable samples are borne, in a shard and in a call."""

from pathlib import Path

import pytest

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.extraction.quarantine import Quarantine
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from tests.extraction.build import PER_SHARD, StandIn, audit, make_lineage


def _extract(server: StandIn, lineage: Lineage) -> list[Manifest]:
    return extract_shards(
        lineage, lineage.recipe.shards, server.open(lineage.staging), lambda shard, made: None
    )


@pytest.mark.parametrize(
    ("planned", "left_out", "exceeded"), [(1, 1, False), (10, 2, True), (200, 2, False), (200, 3, True)]
)
def test_one_is_always_borne_and_more_only_as_a_share(planned: int, left_out: int, exceeded: bool) -> None:
    assert Quarantine(0.01, planned, left_out).is_exceeded is exceeded


def test_one_unusable_sample_in_each_small_shard_is_too_many_in_all(tmp_path: Path) -> None:
    server, lineage = StandIn(), audit(make_lineage(tmp_path))
    server.on_request = lambda number, ids: 400 if ids[1] in (3, 103) else None
    with pytest.raises(
        QualityError, match=r"2 of 20 samples of the shards of this run so far .*in p10-s001: .*refused"
    ):
        _extract(server, lineage)
    assert lineage.hidden_state_shards("p10-s000").manifest() is not None


def test_a_share_that_allows_them_bears_one_in_each_shard(tmp_path: Path) -> None:
    server, lineage = StandIn(), audit(make_lineage(tmp_path, max_quarantined_share=0.1))
    server.on_request = lambda number, ids: 400 if ids[1] in (3, 103) else None
    assert [made.facts["samples"] for made in _extract(server, lineage)] == [PER_SHARD - 1] * 2
