import asyncio
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from eagle3_pipeline.errors import QualityError, ServerDied
from eagle3_pipeline.extraction.capture import Captured, SampleRefusedError
from eagle3_pipeline.extraction.head import Head
from eagle3_pipeline.extraction.layer_table import LayerTable
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.extraction.proof import SAMPLES, chosen, prove
from eagle3_pipeline.extraction.shard_meaning import ShardMeaning
from eagle3_pipeline.recipe.generation import Generation
from eagle3_pipeline.shards.format import ShardLayout
from tests.extraction.build import HIDDEN, LAYERS
from tests.extraction.target import TARGET, make_target
from tests.fakes.states import expected_states

LAYOUT = ShardLayout(LAYERS, HIDDEN, "m" * 64)


def _sample(number: int) -> PlannedSample:
    ids = np.random.default_rng(number).integers(10, 400, 40 + number).tolist()
    return PlannedSample(f"{number}-t0", ids, [0] * 5 + [1] * (len(ids) - 5))


ALL = [_sample(number) for number in range(60)]


def _right(ids: list[int]) -> torch.Tensor:
    return torch.tensor(expected_states(ids, LAYERS, HIDDEN, TARGET)).to(torch.bfloat16)


def _prove(
    head: Head,
    states: Callable[[list[int], bool], torch.Tensor],
    known: LayerTable | None = None,
) -> list[bool]:
    asked: list[bool] = []

    async def fetch(sample: PlannedSample, *, alone: bool = False, again: bool = False) -> Captured:
        asked.append(alone)
        return Captured(torch.tensor(sample.token_ids), states(sample.token_ids, alone))

    asyncio.run(prove(chosen(ALL), fetch, LAYOUT, _meaning(head), known or LayerTable(LAYERS)))
    return asked


def _meaning(head: Head) -> ShardMeaning:
    return ShardMeaning(head, chosen(ALL), Generation(), seed=0)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Head:
    return Head.read(make_target(tmp_path_factory.mktemp("target")))


def test_eight_samples_spread_over_the_shard_are_captured_together_and_then_alone(head: Head) -> None:
    assert [one.sample_id for one in chosen(ALL)] == [f"{7 * number}-t0" for number in range(SAMPLES)]
    assert len(chosen(ALL[:3])) == 3
    assert len(chosen(ALL, 3)) == 3
    assert _prove(head, lambda ids, alone: _right(ids)) == [False] * SAMPLES + [True] * SAMPLES


def test_values_that_are_no_states_refuse_the_server(head: Head) -> None:
    with pytest.raises(
        QualityError, match=r"tried on 8 samples before any shard is made.*8 of them are unusable.*not_finite"
    ):
        _prove(head, lambda ids, alone: _right(ids) * float("nan"))


def test_one_unusable_sample_speaks_against_itself_alone(head: Head) -> None:
    spoilt = ALL[7].token_ids
    _prove(head, lambda ids, alone: _right(ids) * (float("nan") if ids == spoilt else 1))


def test_states_that_depend_on_company_refuse_the_server(head: Head) -> None:
    with pytest.raises(QualityError, match="captured alone, differ"):
        _prove(head, lambda ids, alone: _right(ids) if alone else _right(ids).roll(7, dims=0))


def test_states_that_mean_other_tokens_refuse_the_server(head: Head) -> None:
    with pytest.raises(QualityError, match="before any shard is made"):
        _prove(head, lambda ids, alone: _right(ids).roll(1, dims=0))


def test_layers_that_are_not_those_of_the_first_measurement_refuse_the_server(head: Head) -> None:
    known = LayerTable(LAYERS)
    for one in ALL:
        known.add(_right(one.token_ids))

    def louder(ids: list[int], alone: bool) -> torch.Tensor:
        states = _right(ids)
        states[:, 1] *= 64
        return states

    _prove(head, lambda ids, alone: _right(ids), known)
    with pytest.raises(QualityError, match="before any shard is made"):
        _prove(head, louder, known)


def test_an_error_leaves_no_request_of_the_proof_running(head: Head) -> None:
    async def fetch(sample: PlannedSample, *, alone: bool = False, again: bool = False) -> Captured:
        if sample is ALL[0]:
            raise ServerDied("ended with signal 11")
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> int:
        with pytest.raises(ServerDied):
            await prove(chosen(ALL), fetch, LAYOUT, _meaning(head), LayerTable(LAYERS))
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_states_of_the_proof_are_dropped_as_they_are_compared(head: Head) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    there: list[int] = []

    def watched(ids: list[int], alone: bool) -> torch.Tensor:
        states = _right(ids)
        held.append(weakref.ref(states))
        there.append(sum(one() is not None for one in held))
        return states

    _prove(head, watched)
    assert len(there) == 2 * SAMPLES
    assert there[-1] <= SAMPLES  # two, and what a thread lets go of a moment later


def test_a_server_that_refuses_samples_is_refused(head: Head) -> None:
    def refuse(ids: list[int], alone: bool) -> torch.Tensor:
        raise SampleRefusedError("HTTP 400: no such model")

    with pytest.raises(QualityError, match=r"8 of them are unusable.*no such model"):
        _prove(head, refuse)
