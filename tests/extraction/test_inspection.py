import asyncio
from dataclasses import dataclass, field

import pytest
import torch

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.extraction.alone import Alone
from eagle3_pipeline.extraction.capture import Captured, SampleRefusedError
from eagle3_pipeline.extraction.inspection import Inspector, Outcome, require_same
from eagle3_pipeline.extraction.layer_table import LayerTable
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.shards.format import ShardLayout

LAYOUT = ShardLayout((1, 2, 4), 8, "m" * 64)
IDS = list(range(20, 60))
OTHER = PlannedSample("1-t0", IDS, [1] * len(IDS))
COMPARED = PlannedSample("2-t0", IDS, [1] * len(IDS), is_compared=True)


def _states(seed: int = 0) -> torch.Tensor:
    return torch.randn((len(IDS), 3, 8), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def _broken() -> torch.Tensor:
    states = _states()
    states[3, 1, 2] = float("nan")
    return states


@dataclass
class _Server:
    """Gives these states one after the other, the last one for ever; None is a refusal."""

    answers: list[torch.Tensor | None]
    asked: list[bool] = field(default_factory=list)
    """Whether each request was to be alone."""
    again: list[bool] = field(default_factory=list)

    async def __call__(self, sample: PlannedSample, *, alone: bool = False, again: bool = False) -> Captured:
        self.asked.append(alone)
        self.again.append(again)
        states = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if states is None:
            raise SampleRefusedError("HTTP 400: too long")
        return Captured(torch.tensor(sample.token_ids), states)


def _outcome(server: _Server, sample: PlannedSample = OTHER) -> Outcome:
    async def expected() -> Outcome:
        alone = Alone(server, lambda: iter(()), 2**20, 1)
        inspector = Inspector(server, LAYOUT, LayerTable(LAYOUT.layer_ids), alone=alone)
        inspector.expect([sample])
        try:
            return await inspector.outcome(sample)
        finally:
            await alone.close()

    return asyncio.run(expected())


def _same(alone: torch.Tensor, among_others: torch.Tensor) -> None:
    ids = torch.tensor(IDS)
    require_same("a", Captured(ids, alone), Captured(ids, among_others))


def test_right_states_are_taken_at_once() -> None:
    server = _Server([_states()])
    outcome = _outcome(server)
    assert outcome.captured is not None
    assert (outcome.was_retried, server.asked) == (False, [False])


def test_a_sample_that_fails_is_captured_a_second_time_and_may_then_be_right() -> None:
    outcome = _outcome(server := _Server([_broken(), _states()]))
    assert outcome.captured is not None
    assert (outcome.was_retried, server.again) == (True, [False, True])


def test_a_sample_that_fails_twice_is_given_up_with_its_reason() -> None:
    outcome = _outcome(server := _Server([_broken()]))
    assert (outcome.captured, outcome.reason, len(server.asked)) == (None, "not_finite", 2)


def test_a_refused_sample_is_asked_for_once() -> None:
    outcome = _outcome(server := _Server([None]))
    assert (outcome.captured, outcome.reason, len(server.asked)) == (None, "refused_by_server", 1)


def test_a_sample_that_is_to_be_compared_is_captured_again_alone() -> None:
    outcome = _outcome(server := _Server([_states()]), COMPARED)
    assert (server.asked, outcome.was_compared) == ([False, True], True)
    assert not _outcome(server, OTHER).was_compared


def test_states_that_depend_on_company_end_the_step() -> None:
    with pytest.raises(
        QualityError, match=rf"{COMPARED.sample_id}, captured alone, differ .* none of them can be trusted"
    ):
        _outcome(_Server([_states(), _states(1)]), COMPARED)


def test_a_sample_that_is_refused_alone_was_not_compared_and_is_given_up() -> None:
    outcome = _outcome(_Server([_states(), None]), COMPARED)
    assert (outcome.captured, outcome.reason, outcome.was_compared) == (None, "refused_by_server", False)


@pytest.mark.parametrize("rows", [3, 12, 40])
def test_a_single_row_of_other_experts_is_no_difference(rows: int) -> None:
    states = _states()[:rows]
    routed = states.clone()
    routed[rows - 1] = -routed[rows - 1]
    _same(routed, states)
    with pytest.raises(QualityError):
        _same(states[1:], states)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_seventh_of_the_rows_from_another_sample_is_a_difference(layer: int) -> None:
    states = _states()
    mixed = states.clone()
    mixed[10:16, layer] = _states(1)[10:16, layer]
    for alone, among_others in ((mixed, states), (states, mixed)):
        with pytest.raises(QualityError, match="lowest tenth"):
            _same(alone, among_others)


def test_values_that_are_no_numbers_are_a_difference() -> None:
    with pytest.raises(QualityError):
        _same(_states() * float("nan"), _states())
    some = _states()
    some[:6, 1, 0] = float("nan")
    with pytest.raises(QualityError):
        _same(some, _states())


def test_rows_are_compared_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    similarity = torch.cosine_similarity

    def watch(one: torch.Tensor, other: torch.Tensor, dim: int) -> torch.Tensor:
        nonlocal most
        most = max(most, len(one))
        return similarity(one, other, dim=dim)

    monkeypatch.setattr(torch, "cosine_similarity", watch)
    states = _states().repeat(30, 1, 1)
    _same(states, states)
    assert most == 256
    states_off = states.clone()
    states_off[-400:] = -states_off[-400:]
    with pytest.raises(QualityError):
        _same(states_off, states)
