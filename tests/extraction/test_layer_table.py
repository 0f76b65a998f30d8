import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
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


@pytest.mark.parametrize("samples", [1, 2])
def test_means_of_one_or_two_samples_are_compared_as_well_and_right_ones_pass(
    samples: int, states: list[torch.Tensor]
) -> None:
    settled = _table(states[:40])
    for start in range(40, 80, samples):
        few = states[start : start + samples]
        assert _table(few).differs_from(settled) is None
        assert _table(few, SWAPPED).differs_from(settled) is not None


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


def _louder(sample: torch.Tensor, by: float) -> torch.Tensor:
    """With `by` added to the log scale of one layer."""
    changed = sample.clone()
    changed[:, 6] *= math.exp(by)
    return changed


@pytest.mark.parametrize("place", [0, 15, 31])
def test_a_wrong_sample_among_the_first_does_not_widen_the_bounds_and_is_found_itself(
    place: int, states: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    wrong = _louder(states[place], 2.0)
    table = _table([*states[:place], wrong, *states[place + 1 : 32]])
    assert "1 of the first 32 samples have layers unlike the others'" in caplog.text
    assert table.is_settled
    assert table.samples == 31
    assert table.judge(wrong[:, list(LAYERS)]) == "scale_differs"
    assert table.judge(_louder(states[40], 1.0)[:, list(LAYERS)]) == "scale_differs"
    assert [table.judge(one[:, list(LAYERS)]) for one in states[40:]] == [None] * 40


def test_wrong_samples_that_come_later_do_not_widen_the_bounds(states: list[torch.Tensor]) -> None:
    table = _table([*states[:32], *(_louder(one, 2.0) for one in states[32:40])])
    assert table.samples == 32
    assert table.judge(_louder(states[40], 1.0)[:, list(LAYERS)]) == "scale_differs"


def test_samples_of_a_second_kind_among_the_first_belong_to_the_target(states: list[torch.Tensor]) -> None:
    kinds = [_louder(one, 0.5) if number % 4 == 0 else one for number, one in enumerate(states)]
    table = _table(kinds[:32])
    assert [table.judge(one[:, list(LAYERS)]) for one in kinds[32:]] == [None] * 48


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


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), samples=st.integers(32, 40))
def test_a_table_is_the_same_after_it_was_kept(seed: int, samples: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = LayerTable((1, 2, 4))
    for _ in range(samples):
        table.add(torch.randn(5, 3, 8, generator=generator))
    probe = torch.randn(5, 3, 8, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer_table" / "0.json"
        table.write(path)
        again = LayerTable.read(path)
        assert again is not None
        again.write(path.with_name("1.json"))
        assert path.read_text() == path.with_name("1.json").read_text()
    assert again.is_settled
    assert again.facts() == table.facts()
    assert len(table.facts()) == 5
    assert again.judge(probe) == table.judge(probe)


def test_a_table_that_was_never_kept_is_none(tmp_path: Path) -> None:
    assert LayerTable.read(tmp_path / "0.json") is None


def test_who_differs_from_a_kept_table_is_told_its_file(tmp_path: Path, states: list[torch.Tensor]) -> None:
    _table(states[:40]).write(tmp_path / "0.json")
    settled = LayerTable.read(tmp_path / "0.json")
    assert settled is not None
    said = _table(states[40:48], SWAPPED).differs_from(settled)
    assert f"as over 40 samples before (in {tmp_path / '0.json'}: delete it only if" in str(said)


@pytest.mark.parametrize(
    "change",
    [
        {"mean": [1.0]},
        {"mean": [float("nan")] * 3},
        {"layers": None},
        {"samples": "many"},
        {"samples": 3},
        {"squares": []},
        {"squares": [1.0, -1.0, 1.0]},
        {"squares": None},
    ],
)
def test_a_damaged_table_is_said_to_be_one_once_with_its_file(
    change: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "0.json"
    path.write_text(json.dumps({"layers": [1, 2], "samples": 40, "mean": [1] * 3, "squares": [1] * 3}))
    assert LayerTable.read(path) is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DamagedFile) as caught:
        LayerTable.read(path)
    assert str(caught.value).startswith(f"{path} is no table of layers (")
    assert str(caught.value).count("Delete it, so that it is measured again") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_torn_table_is_a_damaged_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(text)
    with pytest.raises(DamagedFile, match="is no table of layers"):
        LayerTable.read(tmp_path / "0.json")
