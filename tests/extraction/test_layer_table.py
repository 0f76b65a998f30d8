import json
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.extraction.layer_table import LayerTable
from tests.extraction.noise import NoisyLlama

LAYERS = (2, 4, 6, 8)
SWAPPED, TWICE = (4, 2, 6, 8), (2, 4, 4, 8)


@pytest.fixture(scope="module")
def states(llama: NoisyLlama) -> list[torch.Tensor]:
    """All layers' states of 80 samples of a forward of transformers, `[64, layers + 1, H]` each."""
    return [one.states for one in llama.record(80, prompt=60, completion=4, do_sample=True)]


def _table(states: Sequence[torch.Tensor], layers: Sequence[int] = LAYERS) -> LayerTable:
    table = LayerTable(LAYERS)
    for one in states:
        table.add(one[:, list(layers)])
    return table


def test_samples_of_the_same_layers_pass_and_so_do_their_means(states: list[torch.Tensor]) -> None:
    table = _table(states[:40])
    assert [table.judge(one[:, list(LAYERS)]) for one in states[40:]] == [None] * 40
    assert _table(states[40:48]).differs_from(table) is None


@pytest.mark.parametrize("wrong", [SWAPPED, TWICE, (2, 4, 6, 6), (2, 2, 6, 8), (8, 6, 4, 2)])
def test_swapped_layers_and_one_captured_twice_are_found_in_a_single_sample(
    wrong: tuple[int, ...], states: list[torch.Tensor]
) -> None:
    table = _table(states[:40])
    assert all(table.judge(one[:, list(wrong)]) for one in states[40:])


@pytest.mark.parametrize(
    "wrong",
    [
        (1, 4, 6, 8),
        (3, 4, 6, 8),
        (2, 3, 6, 8),
        (2, 5, 6, 8),
        (2, 4, 7, 8),
        (2, 4, 6, 7),
        (1, 3, 5, 7),
        SWAPPED,
    ],
)
def test_a_layer_off_by_one_is_found_in_the_means_of_eight_samples(
    wrong: tuple[int, ...], states: list[torch.Tensor]
) -> None:
    said = _table(states[40:48], wrong).differs_from(_table(states[:40]))
    assert said is not None
    assert "over 8 samples, expected" in said


def test_another_scale_is_named_as_such(states: list[torch.Tensor]) -> None:
    table = _table(states[:40])
    sample = states[41][:, list(LAYERS)].clone()
    sample[:, 2] *= 4
    assert table.judge(sample) == "scale_differs"
    assert "the log scale of layer 6" in str(_table([sample] * 8, range(4)).differs_from(table))


def test_a_layer_of_another_token_is_a_lost_correlation(states: list[torch.Tensor]) -> None:
    table = _table(states[:40])
    sample = states[41][:, list(LAYERS)].clone()
    sample[:, 2] = sample[:, 2].roll(3, dims=0)
    assert table.judge(sample) == "correlation_differs"


def test_nobody_is_judged_by_fewer_than_32_samples(states: list[torch.Tensor]) -> None:
    wrong = states[40][:, list(SWAPPED)]
    assert _table(states[:31]).judge(wrong) is None
    assert _table(states[:32]).judge(wrong) is not None


def test_rounding_never_accuses_a_sample_of_a_table_without_any_spread(states: list[torch.Tensor]) -> None:
    one = states[0][:, list(LAYERS)]
    table = _table([states[0]] * 32)
    for bits in (-1, 1):
        rounded = (one.view(torch.int16) + bits).view(torch.bfloat16)
        assert table.judge(rounded) is None


def test_a_sample_of_one_row_can_be_measured(states: list[torch.Tensor]) -> None:
    assert _table([one[5:6] for one in states[:40]]).judge(states[41][5:6, list(LAYERS)]) is None


def test_a_table_of_other_layers_differs_and_an_empty_one_does_not() -> None:
    said = LayerTable((1, 2)).differs_from(LayerTable((2, 3)))
    assert said == "layers [1, 2] were captured, expected [2, 3]"
    assert LayerTable((1, 2)).differs_from(LayerTable((1, 2))) is None


@given(seed=st.integers(0, 2**31), samples=st.integers(0, 40))
def test_a_table_is_the_same_after_json(seed: int, samples: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = LayerTable((1, 2, 4))
    invented = [torch.randn(5, 3, 8, generator=generator) for _ in range(samples)]
    for one in invented:
        table.add(one)
    again = LayerTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again.to_json() == table.to_json()
    assert again.facts() == table.facts()
    assert len(table.facts()) == (5 if samples else 0)


@pytest.mark.parametrize("change", [{"mean": [1.0]}, {"layers": None}, {"samples": "many"}, {"squares": []}])
def test_a_damaged_table_is_said_to_be_one(change: dict[str, object]) -> None:
    with pytest.raises(DamagedFile, match="Delete it, so that it is measured again"):
        LayerTable.from_json(LayerTable((1, 2)).to_json() | change)
