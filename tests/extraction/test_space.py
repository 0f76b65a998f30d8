import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.extraction import space
from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.extraction.space import SpaceWatch
from tests.extraction.build import HIDDEN, LAYERS, PER_SHARD, StandIn, audit, invent, make_lineage


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    now = SimpleNamespace(free=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: now)
    return lambda count: setattr(now, "free", count)


def test_the_work_ends_before_the_disk_is_full(tmp_path: Path, free: Callable[[int], None]) -> None:
    times = iter(range(10))
    watch = SpaceWatch(tmp_path, keep_free=1 << 30, clock=lambda: float(next(times)))
    watch.take(1 << 35)
    free(1 << 29)
    with pytest.raises(
        NotEnoughRoom, match=r"0.50 GiB are free .* storage.keep_free_gib wants 1.00 GiB left"
    ):
        watch.take(1)


def test_the_disk_is_looked_at_once_a_second(tmp_path: Path, free: Callable[[int], None]) -> None:
    now = [0.0]
    watch = SpaceWatch(tmp_path, keep_free=1 << 30, clock=lambda: now[0])
    watch.take(1)
    free(0)
    watch.take(1)
    now[0] = 1.0
    with pytest.raises(NotEnoughRoom):
        watch.take(1)


def test_the_budget_of_the_recipe_is_never_exceeded(tmp_path: Path) -> None:
    watch = SpaceWatch(tmp_path, keep_free=0, budget=3 << 30)
    watch.take(3 << 30)
    with pytest.raises(
        NotEnoughRoom, match=r"storage.max_gib is reached: .* 3.00 GiB were left at the start"
    ):
        watch.take(1)


def test_states_on_their_way_need_room_as_they_are_captured_and_not_as_they_are_kept(
    tmp_path: Path, free: Callable[[int], None]
) -> None:
    lineage = audit(make_lineage(tmp_path, storage={"keep_free_gib": 0}, precision="fp8", part_gib=1e-9))
    tokens = sum(len(invent(0, index).token_ids) for index in range(PER_SHARD))
    free(tokens * (len(LAYERS) * HIDDEN * 2 + 9))  # all of them as bf16, and nothing for the part
    with pytest.raises(NotEnoughRoom, match="staging"):
        extract_shards(lineage, ["p10-s000"], StandIn().open(lineage.staging), lambda shard, made: None)


def test_a_part_that_lies_in_memory_counts_as_written(
    tmp_path: Path, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "_EVERY_S", 0.0)
    lineage = audit(make_lineage(tmp_path, storage={"keep_free_gib": 1.0}, part_gib=1.0))
    tokens = sum(len(invent(0, index).token_ids) for index in range(PER_SHARD))
    server = StandIn()

    def half_of_the_states_have_room(number: int, ids: list[int]) -> None:
        free((1 << 30) + 4096 + tokens * len(LAYERS) * HIDDEN)

    server.on_request = half_of_the_states_have_room
    with pytest.raises(
        NotEnoughRoom, match=r"of which the part in memory takes .* finished shards and parts"
    ):
        extract_shards(lineage, ["p10-s000"], server.open(lineage.staging), lambda shard, made: None)
    assert not list(lineage.hidden_state_shards("p10-s000").folder.glob("*part-*"))
