import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.extraction.checks import reason_against

IDS = list(range(600))  # more than one chunk of rows


def _states() -> torch.Tensor:
    return torch.randn((600, 3, 8), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def _reason(states: torch.Tensor, ids: list[int] = IDS, came: list[int] | None = None) -> str | None:
    return reason_against(ids, torch.tensor(ids if came is None else came), states, 3, 8)


def test_states_of_the_right_shape_and_finite_pass() -> None:
    assert _reason(_states()) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 255, 256, 599])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(value: float, row: int) -> None:
    states = _states()
    states[row, 2, 7] = value
    assert _reason(states) == "not_finite"


def test_rows_layers_width_dtype_and_ids_must_be_those_asked_for() -> None:
    states = _states()
    assert _reason(states[:-1]) == "rows_differ"
    assert _reason(states[:, 0]) == "rows_differ"
    assert _reason(states[:, :2]) == "shape_differs"
    assert _reason(states[:, :, :4]) == "shape_differs"
    assert _reason(states.float()) == "dtype_differs"
    assert _reason(states, came=[*IDS[:-1], 1]) == "token_ids_differ"
    assert _reason(states, came=IDS[:-1]) == "token_ids_differ"


def test_a_layer_or_a_row_that_was_never_written_is_found() -> None:
    layer, row = _states(), _states()
    layer[:, 1] = 0
    row[300, 1] = 0
    assert _reason(layer) == "zero_layer"
    assert _reason(row) == "zero_row"


def test_a_layer_with_the_same_row_for_different_tokens_is_found() -> None:
    states = _states()
    states[:, 1] = states[0, 1]
    assert _reason(states) == "constant_layer"


def test_the_same_token_over_and_over_rightly_has_the_same_states() -> None:
    states = _states()[:1].expand(600, 3, 8)
    assert _reason(states, [7] * 600) is None
    assert _reason(_states()[:1], [7]) is None


@pytest.mark.parametrize("start", [0, 100, 254, 596])
def test_a_run_of_four_rows_that_are_the_same_for_different_tokens_is_found(start: int) -> None:
    four, three, longer = _states(), _states(), _states()
    four[start : start + 4, 1] = four[start, 1]
    three[start : start + 3, 1] = three[start, 1]
    longer[start : start + 300, 1] = longer[start, 1]
    assert _reason(four) == "constant_rows"
    assert _reason(three) is None
    assert _reason(longer) == "constant_rows"


def test_a_repeated_token_within_a_sample_rightly_has_the_same_states_in_each_row() -> None:
    states = _states()
    states[100:110] = states[100]
    ids = [*IDS[:100], *([7] * 10), *IDS[110:]]
    assert _reason(states, ids) is None
    assert _reason(states, [*ids[:109], 8, *ids[110:]]) == "constant_rows"


def test_rows_that_begin_alike_are_not_the_same() -> None:
    states = torch.randn((600, 3, 32), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    states[:, :, :16] = states[0, 0, :16]
    states[:, :, 9] = 100.0
    assert reason_against(IDS, torch.tensor(IDS), states, 3, 32) is None


@given(
    rows=st.integers(1, 12),
    row=st.integers(0, 11),
    bits=st.sampled_from([0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF]),
)
def test_every_infinity_and_every_nan_is_found(rows: int, row: int, bits: int) -> None:
    states = _states()[:rows].clone()
    states.view(torch.int16)[row % rows, 1, 3] = bits - 0x10000 if bits & 0x8000 else bits
    assert _reason(states, IDS[:rows]) == "not_finite"


def test_the_largest_finite_value_and_negative_zeros_are_no_fault() -> None:
    states = _states()
    states[3, 1] = torch.finfo(torch.bfloat16).max
    states[4, 1, 1:] = -0.0
    assert _reason(states) is None
    states[4, 1, 0] = -0.0
    assert _reason(states) == "zero_row"
