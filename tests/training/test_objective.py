"""Rows of each test-time step; batches whose gradients add up to that of their whole."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.training.batches import pack
from eagle3_pipeline.training.draft import trained_parameters
from eagle3_pipeline.training.objective import Objective, rows_by_step
from tests.training.tiny import Memory, draft, memory, plan

_SIZES = [(23, 7), (11, 4), (30, 12), (5, 2)]
_SAMPLE = memory([(12, 0)]).samples[0]


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=12), min_size=1, max_size=4), st.integers(1, 5))
def test_a_run_of_n_rows_has_n_minus_k_at_step_k(masks: list[list[bool]], steps: int) -> None:
    samples = [{**_SAMPLE, "loss_mask": torch.tensor(mask)} for mask in masks]
    for one in samples:
        one |= {name: one[name][: len(one["loss_mask"])] for name in ("token_ids", "hidden_states")}
    runs = pack(Memory(samples), range(len(samples))).runs
    lengths = torch.unique_consecutive(runs, return_counts=True)[1].tolist()
    expected = [sum(max(0, length - k) for length in lengths) for k in range(steps)]
    assert rows_by_step((one["loss_mask"] for one in samples), steps) == expected


def test_the_counts_are_those_of_the_steps_that_are_taken() -> None:
    source = memory(_SIZES)
    steps = Objective(draft(), plan(Path()), torch.float32).steps(pack(source, range(4)))
    assert _counts(source) == [len(step.rows) for step in steps]


def _counts(source: Memory) -> list[int]:
    return rows_by_step((source.loss_mask(index) for index in range(4)), 3)


def test_gradients_of_batches_add_up_to_the_gradient_of_one_batch_of_all_rows() -> None:
    source = memory(_SIZES)
    model = draft()
    objective = Objective(model, plan(Path()), torch.float32)
    counts = _counts(source)

    def gradients(*packed: tuple[int, ...]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for indices in packed:
            objective(pack(source, indices), counts)[0].backward()
        return {name: one.grad for name, one in trained_parameters(model).items() if one.grad is not None}

    at_once, dealt = gradients((0, 1, 2, 3)), gradients((0, 3), (2,), (1,))
    assert at_once.keys() == trained_parameters(model).keys()
    for name, gradient in at_once.items():
        torch.testing.assert_close(dealt[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_whole_step_in_one_batch_has_the_decayed_means_of_its_rows() -> None:
    source = memory(_SIZES)
    loss, steps = Objective(draft(), plan(Path()), torch.float32)(pack(source, range(4)), _counts(source))
    expected = sum(0.8**k * float(step.mean.detach()) for k, step in enumerate(steps))
    assert float(loss.detach()) == pytest.approx(expected)
