import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.shards.precision import quantise, restore

_LARGEST = 3e38  # just below the largest of bfloat16, which rounding up would make infinite
_BF16 = st.floats(min_value=-(2.0**127), max_value=2.0**127, width=32).map(
    lambda value: float(torch.tensor(value).to(torch.bfloat16))
)


@settings(deadline=None, max_examples=200)
@given(rows=st.lists(st.lists(_BF16, min_size=6, max_size=6), min_size=1, max_size=5))
def test_no_state_saturates_and_its_error_has_the_stated_bound(rows: list[list[float]]) -> None:
    states = torch.tensor(rows, dtype=torch.float64).to(torch.bfloat16)
    values, scales = quantise(states)
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    exact = values.double() * scales.double()[..., None]
    error = (exact - states.double()).abs()
    assert bool((error <= states.double().abs() / 16 + scales.double()[..., None] / 1024).all())
    assert torch.equal(restore(values, scales), exact.to(torch.bfloat16))
    assert torch.equal(scales.log2(), scales.log2().round())


@settings(deadline=None, max_examples=50)
@given(rows=st.lists(st.lists(_BF16, min_size=6, max_size=6), min_size=1, max_size=5))
def test_what_was_restored_is_written_again_without_another_loss(rows: list[list[float]]) -> None:
    once = restore(*quantise(torch.tensor(rows, dtype=torch.float64).to(torch.bfloat16)))
    assert torch.equal(restore(*quantise(once)), once)


def test_each_of_the_256_values_is_restored_as_torch_converts_it() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    restored = restore(values[None], torch.ones(1))[0]
    torch.testing.assert_close(restored, values.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def test_rows_of_zeros_and_of_the_least_and_the_largest_numbers_have_a_finite_scale() -> None:
    least = torch.tensor(1, dtype=torch.int16).view(torch.bfloat16)
    states = torch.stack([torch.zeros(4), torch.full((4,), float(least)), torch.full((4,), _LARGEST)])
    values, scales = quantise(states.to(torch.bfloat16))
    assert bool(scales.isfinite().all())
    assert bool((scales > 0).all())
    restored = restore(values, scales)
    assert torch.equal(restored[0], torch.zeros(4, dtype=torch.bfloat16))
    assert bool((restored[2].float() / _LARGEST - 1).abs().max() < 1 / 16)


def test_an_odd_hidden_size_is_refused_when_it_is_written() -> None:
    with pytest.raises(ValueError, match="a hidden size of 3, expected an even one"):
        quantise(torch.ones(2, 3, dtype=torch.bfloat16))


def test_rows_that_tell_tokens_apart_keep_their_direction() -> None:
    states = torch.randn(512, 4, 64, generator=torch.Generator().manual_seed(0))
    states[:, :, 0] *= 300  # an outlier, as the residual streams of real models have them
    states = states.to(torch.bfloat16)
    found = restore(*quantise(states)).double()
    assert torch.nn.functional.cosine_similarity(found, states.double(), dim=-1).min() > 0.998
