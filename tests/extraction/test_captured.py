"""Reading back what was captured while a sample was generated."""

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.extraction.capture import Captured
from eagle3_pipeline.extraction.captured import captured, discard_all, from_files, shards_of_files
from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples import Sample
from tests.extraction.build import HIDDEN, LAYERS, invent, make_lineage
from tests.extraction.target import TARGET
from tests.fakes.faults import Faults
from tests.fakes.states import expected_states, write_states

SAMPLE = invent(0, 0, completion_token_ids=list(range(10, 30)))
IDS = SAMPLE.token_ids[:-1]


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    return make_lineage(tmp_path, [[SAMPLE]])


def shard(lineage: Lineage) -> str:
    return lineage.recipe.shards[0]


def file_of(lineage: Lineage, sample: Sample = SAMPLE) -> Path:
    return lineage.captured(shard(lineage)) / f"{sample.sample_id}.safetensors"


def leave(lineage: Lineage, ids: list[int], faults: Faults = Faults()) -> None:  # noqa: B008
    file_of(lineage).parent.mkdir(parents=True, exist_ok=True)
    write_states(file_of(lineage), ids, LAYERS, HIDDEN, TARGET, faults)


def planned(ids: list[int]) -> PlannedSample:
    return PlannedSample(SAMPLE.sample_id, ids, SAMPLE.loss_mask[: len(ids)])


@pytest.mark.parametrize("length", [len(IDS), 7])
def test_a_planned_sample_gets_its_rows_of_the_file(length: int, lineage: Lineage) -> None:
    leave(lineage, IDS)
    found = captured(lineage, shard(lineage), planned(IDS[:length]))
    assert found is not None
    assert found.token_ids.tolist() == IDS[:length]
    expected = expected_states(IDS, LAYERS, HIDDEN, TARGET)[:length]
    assert torch.equal(found.states.float(), torch.tensor(expected))


def test_without_a_file_there_is_nothing_and_nobody_is_warned(
    lineage: Lineage, caplog: pytest.LogCaptureFixture
) -> None:
    assert captured(lineage, shard(lineage), planned(IDS)) is None
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("ids", "faults", "reason"),
    [
        ([*IDS[:-1], 400], Faults(), "token_ids_differ"),  # another reply to the same prompt
        (IDS[:-3], Faults(), "token_ids_differ"),
        (IDS, Faults(short_share=1), "rows_differ"),
        (IDS, Faults(nan_share=1), "not_finite"),
        (IDS, Faults(torn_share=1), "cannot be read"),
    ],
)
def test_a_file_that_is_not_right_is_as_good_as_none(
    ids: list[int], faults: Faults, reason: str, lineage: Lineage, caplog: pytest.LogCaptureFixture
) -> None:
    leave(lineage, ids, faults)
    assert captured(lineage, shard(lineage), planned(IDS)) is None
    (message,) = caplog.messages
    assert reason in message


def test_files_of_other_layers_are_not_found_however_many_layers_they_hold(
    lineage: Lineage,
) -> None:
    leave(lineage, IDS)
    extraction = lineage.recipe.extraction.model_copy(update={"layers": (1, 3, LAYERS[-1])})
    other = Lineage(lineage.recipe.model_copy(update={"extraction": extraction}), lineage.storage_root)
    assert len(extraction.layers) == len(LAYERS)
    assert captured(other, shard(other), planned(IDS)) is None
    assert captured(lineage, shard(lineage), planned(IDS)) is not None


def test_an_empty_file_is_as_good_as_none(lineage: Lineage) -> None:
    leave(lineage, IDS)
    file_of(lineage).write_bytes(b"")
    assert captured(lineage, shard(lineage), planned(IDS)) is None


def test_files_go_one_by_one_and_at_last_all_of_a_shard(lineage: Lineage) -> None:
    leave(lineage, IDS)
    stays = file_of(lineage, invent(0, 1))
    stays.write_bytes(b"")
    assert len(list(stays.parent.iterdir())) == 2
    for _ in range(2):
        discard_all(lineage, shard(lineage))
        assert not stays.parent.exists()


def test_files_that_a_kill_left_beside_a_made_shard_go_when_it_is_found(lineage: Lineage) -> None:
    leave(lineage, IDS)
    for place in (lineage.sample_audit(), lineage.hidden_state_shards(shard(lineage))):
        place.folder.mkdir(parents=True, exist_ok=True)
        place.finish([], {})
    extract_shards(lineage, [shard(lineage)], nullcontext(), lambda *_: None)  # type: ignore[arg-type]
    assert not file_of(lineage).exists()


def test_states_come_from_files_where_there_are_any_and_else_from_the_server(lineage: Lineage) -> None:
    leave(lineage, IDS)
    asked: list[bool] = []

    async def server(sample: PlannedSample, *, alone: bool = False) -> Captured:
        asked.append(alone)
        return Captured(torch.tensor(sample.token_ids), torch.zeros(1))

    ours = planned(IDS)
    files = shards_of_files(lineage, {shard(lineage): [ours, PlannedSample("other-t0", IDS, [1])]})
    assert files == {SAMPLE.sample_id: shard(lineage)}
    fetch = from_files(lineage, files, server)
    assert asyncio.run(fetch(ours)).states.shape == (len(IDS), len(LAYERS), HIDDEN)
    assert asked == []
    asyncio.run(fetch(ours, alone=True))
    asyncio.run(fetch(PlannedSample("other-t0", IDS, [1])))
    assert asked == [True, False]
    asyncio.run(fetch(ours, again=True))  # what its file holds was not right
    assert asked == [True, False, False]


def test_without_a_server_a_file_that_is_not_right_goes_and_the_next_call_has_one(lineage: Lineage) -> None:
    leave(lineage, IDS, Faults(nan_share=1))
    fetch = from_files(lineage, {SAMPLE.sample_id: shard(lineage)}, None)
    with pytest.raises(DamagedFile, match="the extraction server then makes the states of this sample"):
        asyncio.run(fetch(planned(IDS)))
    assert not file_of(lineage).exists()
