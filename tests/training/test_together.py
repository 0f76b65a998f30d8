"""Batches of a step, dealt out to processes or one after the other: the same step, also after a stop."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.tiny import memory, split
from tests.training.together import PER_STEP, SIZES, gradients, stop_server, train, weights_of

_NEARLY = {"rtol": 1e-3, "atol": 1e-4}  # Adam magnifies the last bits of gradients that are nearly zero


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    yield
    stop_server()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("alone")
    assert train(folder) == [0]
    return weights_of(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("pair")
    assert train(folder, 2, accumulation=2) == [0, 0]
    return weights_of(folder)


def _same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_a_step_is_the_same_however_its_rows_are_dealt_out(
    tmp_path: Path, alone: dict[str, torch.Tensor], processes: int, accumulation: int
) -> None:
    assert 0 < len(split(memory(SIZES)).training) % PER_STEP < 4  # the last step of an epoch has one batch
    assert train(tmp_path, processes, accumulation=accumulation) == [0] * processes
    for name, weights in weights_of(tmp_path).items():
        torch.testing.assert_close(
            weights, alone[name], **_NEARLY, msg=lambda text, name=name: f"{name}: {text}"
        )


_UNEQUAL = [(23, 7), (11, 4), (30, 12), (5, 2), (19, 3), (40, 30), (8, 1), (14, 9)]
_BATCHES = ((0,), (1, 2), (3,), (4, 5, 6), (7,))


@pytest.mark.parametrize(
    ("processes", "batches"), [(1, _BATCHES), (2, _BATCHES), (3, _BATCHES), (3, ((4, 1, 6), (2, 0, 3, 5, 7)))]
)
def test_the_gradients_of_unequal_batches_are_those_of_one_batch_of_all_rows(
    tmp_path: Path, processes: int, batches: tuple[tuple[int, ...], ...]
) -> None:
    dealt, whole = tmp_path / "dealt", tmp_path / "whole"
    dealt.mkdir()
    whole.mkdir()
    (expected,) = gradients(whole, 1, _UNEQUAL, (tuple(range(len(_UNEQUAL))),))
    assert expected["norm"] > 0.1
    for found in gradients(dealt, processes, _UNEQUAL, batches):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pair_of_which_one_is_killed_ends_and_goes_on_to_the_same_bits(
    tmp_path: Path, pair: dict[str, torch.Tensor], rank: int
) -> None:
    changes = {"accumulation": 2, "checkpoint_every_s": 0.0}
    codes = train(tmp_path, 2, sent=(rank, signal.SIGKILL, 40), **changes)
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] != 0
    assert any(tmp_path.glob("step-*"))
    assert train(tmp_path, 2, **changes) == [0, 0]
    assert _same_bits(weights_of(tmp_path), pair)


def test_a_pair_of_which_one_is_asked_to_end_leaves_together_with_a_checkpoint(
    tmp_path: Path, pair: dict[str, torch.Tensor]
) -> None:
    assert train(tmp_path, 2, sent=(1, signal.SIGTERM, 40), accumulation=2) == [143, 143]
    assert any(tmp_path.glob("step-*"))
    assert train(tmp_path, 2, accumulation=2) == [0, 0]
    assert _same_bits(weights_of(tmp_path), pair)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_training_that_is_ended_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, number: signal.Signals, optimizer: str
) -> None:
    changes = {"optimizer": optimizer, "pull_to_start": 0.1, "accumulation": 2}
    often = {"checkpoint_every_s": 0.0} if number == signal.SIGKILL else {}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    straight.mkdir()
    stopped.mkdir()
    assert train(straight, **changes) == [0]
    for reads in (30, 50, 35):
        assert train(stopped, sent=(0, number, reads), **changes, **often) != [0]
    assert train(stopped, **changes) == [0]
    assert _same_bits(weights_of(stopped), weights_of(straight))


def test_a_loss_that_is_no_number_is_seen_by_all_whoever_had_the_batch(tmp_path: Path) -> None:
    source = memory(SIZES)
    bad = split(source).training[-1]
    source.samples[bad]["hidden_states"][3, 1, 0] = torch.nan
    assert train(tmp_path, 2, source=source) == [1, 1]
    for rank in range(2):
        told = (tmp_path / f"failed-{rank}").read_text()
        assert f"its states are not finite in {source.name(bad)}" in told


def test_another_number_of_processes_begins_the_epoch_again_with_the_weights_of_now(tmp_path: Path) -> None:
    assert train(tmp_path, 1, sent=(0, signal.SIGTERM, 110)) == [143]
    (stopped,) = [path for path in tmp_path.glob("step-*") if path.name != "step-00000006"]
    at = json.loads((stopped / "state.json").read_text())["progress"]
    assert (at["epoch"], at["step"]) == (1, 6 + at["batch"])
    assert at["batch"] > 0
    weights = load_file(stopped / "weights.safetensors")
    assert train(tmp_path, 2, sent=(0, signal.SIGKILL, 1))[0] == -signal.SIGKILL  # before its first step
    (again,) = tmp_path.glob("step-*")
    assert again.name == "step-00000006"
    assert _same_bits(load_file(again / "weights.safetensors"), weights)
    assert train(tmp_path, 2) == [0, 0]
