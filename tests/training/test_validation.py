"""The walk of serving: the example of the module, and what holds for every run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.training.batches import pack
from eagle3_pipeline.training.objective import Objective, rows_by_step
from eagle3_pipeline.training.validation import Judgement, judge, walk
from tests.training.tiny import DRAFT, draft, memory, plan


def test_the_walk_of_the_module_takes_three_drafts_of_three_accepted_tokens() -> None:
    # Rows stand at a .. f and propose b .. g; the draft is right with b, d and e.
    right = torch.tensor([[1, 0], [0, 0], [1, 1], [1, 0], [0, 0], [0, 0]]).bool()
    drafts, accepted = walk(right, torch.zeros(6, dtype=torch.int64))
    assert (drafts, accepted) == (3, [2, 1])


def test_a_run_starts_its_own_walk() -> None:
    right = torch.ones(6, 2, dtype=torch.bool)
    drafts, accepted = walk(right, torch.tensor([0, 0, 0, 0, 1, 1]))
    assert (drafts, accepted) == (3, [3, 3])  # at rows 0 and 3 of the first run, at row 0 of the second


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=40))
@settings(deadline=None)
def test_accepted_tokens_and_drafts_together_cover_the_text(right: list[list[bool]]) -> None:
    drafts, accepted = walk(torch.tensor(right), torch.zeros(len(right), dtype=torch.int64))
    assert accepted == sorted(accepted, reverse=True)
    assert len(right) <= drafts + sum(accepted) <= len(right) + 3


def test_a_draft_that_is_never_right_has_length_one() -> None:
    assert walk(torch.zeros(5, 3, dtype=torch.bool), torch.zeros(5, dtype=torch.int64)) == (5, [0, 0, 0])


def test_fewer_tokens_a_draft_walk_from_other_tokens_and_not_the_first_positions_of_the_same_drafts() -> None:
    right = torch.tensor([[1, 0], [0, 0], [1, 1], [1, 0], [0, 0], [0, 0]]).bool()  # the module's example
    batch: Any = SimpleNamespace(labels=torch.arange(1, 7), runs=torch.zeros(6, dtype=torch.int64))
    steps: list[Any] = []
    for k in range(2):
        rows = torch.arange(6 - k)
        proposals = torch.where(right[rows, k], batch.labels[rows + k], 0)
        steps.append(SimpleNamespace(rows=rows, proposals=proposals, loss=torch.tensor(1.0)))
    judgement = judge([(steps, batch)], torch.arange(7), 0.8)
    assert judgement.acceptance_length == 2.0
    assert judgement.acceptance_by_tokens == (1.5, 2.0)  # with one token it stands at a, c, e and f
    assert judgement.acceptance_by_position[0] == 2 / 3


def test_samples_are_judged_the_same_however_they_are_packed() -> None:
    source = memory([(40, 5), (9, 4), (12, 9), (25, 3)])
    objective = Objective(draft(), plan(Path()), torch.float32)

    def judged(*packed: tuple[int, ...]) -> Judgement:
        batches = [pack(source, indices) for indices in packed]
        return judge([(objective.steps(batch), batch) for batch in batches], torch.arange(DRAFT), 0.8)

    whole, dealt = judged((0, 1, 2, 3)), judged((0,), (1, 2), (3,))
    assert dealt.loss == pytest.approx(whole.loss, rel=1e-5)
    assert dealt.accuracy_by_position == whole.accuracy_by_position
    assert dealt.acceptance_by_tokens == whole.acceptance_by_tokens
    trained, _ = objective(pack(source, range(4)), rows_by_step(map(source.loss_mask, range(4)), 3))
    assert whole.loss == pytest.approx(float(trained.detach()), rel=1e-5)
