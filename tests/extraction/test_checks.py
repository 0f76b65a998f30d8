import pytest
import torch

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
