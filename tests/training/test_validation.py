"""The walk of serving: the example of the module, and what holds for every run."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.training.validation import walk


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
