"""Alignment on a worked row, packing, order, and what is dropped."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.errors import DamagedFile, MissingInput, QualityError
from eagle3_pipeline.training.batches import fill, pack, plan_epoch, split_samples, supervised_rows
from tests.training.tiny import Memory, memory


def _numbered(tokens: int, prompt: int, first: int = 0) -> dict[str, torch.Tensor]:
    """A sample in which every tensor says its own position: x_p = 10 + p, g_p = p, y_p = 100 + p."""
    at = torch.arange(first, first + tokens)
    states = torch.stack([at, at, 100 + at], dim=1)[:, :, None].float()
    return {"hidden_states": states, "token_ids": 10 + at, "loss_mask": torch.arange(tokens) >= prompt}


def test_the_worked_row_of_the_module_is_what_pack_makes() -> None:
    batch = pack(Memory([_numbered(7, 3)]), [0])
    assert batch.tokens.tolist() == [11, 12, 13, 14, 15, 16]  # x1 .. x6
    assert batch.states.tolist() == [[p, p] for p in range(6)]  # beside g0 .. g5
    assert batch.supervised.tolist() == [2, 3, 4]
    assert batch.labels.tolist() == [14, 15, 16]  # x4, x5, x6
    assert batch.verifier.flatten().tolist() == [103, 104, 105]  # y3, y4, y5
    assert batch.lengths == (6,)


def test_samples_lie_end_to_end_and_runs_never_cross_them() -> None:
    batch = pack(Memory([_numbered(5, 2), _numbered(6, 3, 50)]), [0, 1])
    assert batch.lengths == (4, 5)
    assert batch.supervised.tolist() == [1, 2, 6, 7]
    assert batch.labels.tolist() == [13, 14, 64, 65]
    assert batch.runs.tolist() == [0, 0, 1, 1]


def test_a_mask_with_a_hole_makes_two_runs() -> None:
    one = _numbered(9, 0)
    one["loss_mask"] = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 1]).bool()
    batch = pack(Memory([one]), [0])
    assert batch.supervised.tolist() == [0, 1, 5, 6]
    assert batch.runs.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("mask", [[0, 0, 0, 0], [0, 0, 0, 1], [1], []])
def test_a_mask_with_nothing_to_propose_has_no_supervised_row(mask: list[int]) -> None:
    assert not len(supervised_rows(torch.tensor(mask)))


def test_a_mask_of_only_ones_is_supervised_to_its_last_token() -> None:
    assert supervised_rows(torch.ones(4)).tolist() == [0, 1]


class _Named(Memory):
    """Samples with ids of their own."""

    def __init__(self, *names: str) -> None:
        super().__init__(memory([(12, 4)] * len(names)).samples)
        self.names = names

    def name(self, index: int) -> str:
        return self.names[index]


def test_samples_without_a_supervised_token_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    source = memory([(12, 4), (12, 12), *[(12, 4)] * 17, (9, 8)])
    split = split_samples(source, {"sample-0", "sample-1", "sample-3"})
    assert split.without_supervision == 2
    assert split.validation == (0, 3)
    assert sorted(split.training + split.validation) == [0, *range(2, 19)]
    assert "2 of 20 samples have no supervised token" in caplog.text


def test_many_samples_without_a_supervised_token_are_an_error_with_the_bound() -> None:
    sizes = [(12, 4), (12, 12), *[(12, 4)] * 16, (9, 8)]
    with pytest.raises(QualityError, match=r"2 of 19 samples .* at most 10% are tolerated\. Raise"):
        split_samples(memory(sizes), {"sample-0"})


def test_a_mask_that_supervises_the_prompt_is_refused_with_the_samples_name() -> None:
    source = memory([(12, 4), (12, 4), (12, 0)])
    with pytest.raises(DamagedFile, match=r"loss mask of sample-2 has a one for each of its 12 tokens"):
        split_samples(source, {"sample-0"})


def test_a_conversation_is_held_out_whole_whatever_its_place_and_no_other_one_is() -> None:
    source = _Named("ab-t0", "b-t0", "a-t0", "a-t1", "c-t0", "a-t10", "b-t1")
    split = split_samples(source, {"a", "c", "never asked"})
    assert split.validation == (2, 3, 4, 5)
    assert split.training == (0, 1, 6)


@pytest.mark.parametrize(
    ("judges", "found"), [({"z"}, "3 samples .* 0 judge and 3 train"), ({"a", "b"}, "3 judge and 0 train")]
)
def test_nothing_that_judges_or_nothing_that_trains_is_an_error_with_the_numbers(
    judges: set[str], found: str
) -> None:
    with pytest.raises(MissingInput, match=rf"{found}.*first prompts\.validation prompts"):
        split_samples(_Named("a-t0", "b-t0", "b-t1"), judges)


def test_a_sample_that_judges_is_labelled_with_the_targets_choices() -> None:
    chosen = {**_numbered(7, 3), "choices": torch.tensor([14, 99, 16])}
    batch = pack(Memory([_numbered(5, 2), chosen]), [0, 1])
    assert batch.labels.tolist() == [13, 14, 14, 99, 16]


@given(
    st.lists(st.tuples(st.integers(4, 30), st.just(1)), min_size=2, max_size=25),
    st.integers(5, 60),
    st.integers(0, 3),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=40)
def test_an_epoch_takes_each_training_sample_once_within_the_bound_in_an_order_of_seed_and_epoch(
    sizes: list[tuple[int, int]], tokens_per_step: int, seed: int, epoch: int
) -> None:
    split = split_samples(memory(sizes), {"sample-1"})
    batches = plan_epoch(split, tokens_per_step, seed, epoch)
    assert sorted(index for batch in batches for index in batch) == list(split.training)
    for batch in batches:
        assert sum(split.rows[index] for index in batch) <= tokens_per_step or len(batch) == 1
    assert batches == plan_epoch(split, tokens_per_step, seed, epoch)
    assert split.validation == (1,)


def test_epochs_differ_in_their_order() -> None:
    split = split_samples(memory([(8, 2)] * 20), {"sample-0"})
    assert plan_epoch(split, 100, 0, 0) != plan_epoch(split, 100, 0, 1)


def test_a_sample_longer_than_a_step_is_a_batch_of_its_own() -> None:
    split = split_samples(memory([(10, 2), (50, 2), (10, 2)]), {"sample-0"})
    assert list(fill(split, [0, 1, 2], 20)) == [(0,), (1,), (2,)]
