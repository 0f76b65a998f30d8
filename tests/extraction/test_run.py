from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import MANIFEST_NAME, Manifest
from tests.extraction.build import StandIn, audit, invent, make_lineage
from tests.fakes import states as states_module
from tests.fakes.heads import SpokenHead

SAMPLES = 40


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    return audit(make_lineage(tmp_path, [[invent(0, index) for index in range(SAMPLES)]], part_gib=1e-3))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _extract(lineage: Lineage) -> tuple[Manifest, int]:
    """The manifest, and the number of threads while it was made."""
    threads: list[int] = []
    (made,) = extract_shards(
        lineage,
        lineage.recipe.shards,
        StandIn().open(lineage.staging),
        lambda shard, manifest: threads.append(torch.get_num_threads()),
    )
    return made, threads[0]


def _louder(monkeypatch: pytest.MonkeyPatch, *wrong: int) -> None:
    """A layer of these samples is 64 times as large."""
    right = states_module.expected_states

    def states(
        token_ids: Sequence[int], layers: Sequence[int], hidden: int, head: SpokenHead | None
    ) -> npt.NDArray[np.float32]:
        found = right(token_ids, layers, hidden, head)
        found[:, 1] *= 64 if token_ids[1] in wrong else 1
        return found

    monkeypatch.setattr(states_module, "expected_states", states)


def test_the_very_first_samples_are_judged_by_their_scale_too(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    _louder(monkeypatch, 1)
    made, _ = _extract(lineage)
    assert made.facts["quarantined_samples"] == {"1-t0": "scale_differs"}
    assert made.facts["samples"] == SAMPLES - 1


def test_layers_are_measured_once_and_a_server_of_other_ones_is_told_the_file(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = _extract(lineage)
    assert made.facts["quarantined"] == {}
    manifest = lineage.hidden_state_shards(lineage.recipe.shards[0]).folder / MANIFEST_NAME
    (table,) = (lineage.folder / "layer_table").iterdir()
    before = table.read_bytes()
    manifest.unlink()
    assert _extract(lineage)[0].facts["samples"] == SAMPLES
    assert table.read_bytes() == before
    manifest.unlink()
    _louder(monkeypatch, *range(SAMPLES))
    with pytest.raises(QualityError) as caught:
        _extract(lineage)
    assert "the log scale of layer 2 is" in str(caught.value)
    assert str(table) in str(caught.value)


@pytest.mark.parametrize(("gpus", "threads"), [((), 1), (("0",), 2)], ids=["beside", "on GPUs"])
def test_one_thread_works_where_the_server_has_the_same_cores_and_all_of_them_afterwards(
    gpus: tuple[str, ...], threads: int, lineage: Lineage, two_threads: None
) -> None:
    partitions = lineage.recipe.partitions.model_copy(update={"extraction": gpus})
    recipe = lineage.recipe.model_copy(update={"partitions": partitions})
    assert _extract(Lineage(recipe, lineage.storage_root))[1] == threads
    assert torch.get_num_threads() == 2
