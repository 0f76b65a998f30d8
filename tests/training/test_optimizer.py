"""Rates by part, Muon beside AdamW, the pull to the start, and a state that goes on exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_pipeline.training.draft import trained_parameters
from eagle3_pipeline.training.optimizer import Optimizer, freeze_parts, part_of
from tests.training.tiny import draft, plan

_RATES = {"fusion": 1.0, "layer": 1.0, "norm": 1.0, "head": 1.0}


def _make(**changes: Any) -> tuple[dict[str, torch.nn.Parameter], Optimizer]:
    parameters = trained_parameters(draft(fc_norm=True))
    return parameters, Optimizer(parameters, plan(Path(), **changes))


def _steps(parameters: dict[str, torch.nn.Parameter], optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for one in parameters.values():
            one.grad = torch.randn(one.shape, generator=generator)
        optimizer.clip()
        optimizer.step(1.0)


def _moved(parameters: dict[str, torch.nn.Parameter]) -> dict[str, float]:
    start = trained_parameters(draft(fc_norm=True))
    return {name: float((one - start[name]).detach().abs().mean()) for name, one in parameters.items()}


def test_every_trained_parameter_belongs_to_a_part_that_has_a_rate() -> None:
    names = trained_parameters(draft(fc_norm=True))
    assert {part_of(name) for name in names} == set(_RATES)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_part_moves_in_proportion_to_its_rate(kind: str) -> None:
    parameters, optimizer = _make(optimizer=kind, weight_decay=0.0)
    slow, slower = _make(optimizer=kind, weight_decay=0.0, rates={**_RATES, "layer": 0.25})
    _steps(parameters, optimizer, range(1))
    _steps(slow, slower, range(1))
    whole, quarter = _moved(parameters), _moved(slow)
    for name in parameters:
        share = 0.25 if part_of(name) == "layer" else 1
        assert quarter[name] == pytest.approx(share * whole[name], rel=1e-3), name


def test_a_part_with_the_rate_zero_is_not_trained() -> None:
    model = draft()
    freeze_parts(model, {**_RATES, "fusion": 0.0, "head": 0.0})
    names = trained_parameters(model)
    assert names
    assert not any(part_of(name) in ("fusion", "head") for name in names)


def test_muon_takes_the_matrices_but_the_head_and_moves_them_as_far_as_adamw() -> None:
    parameters, optimizer = _make(optimizer="muon", weight_decay=0.0)
    _steps(parameters, optimizer, range(1))
    by_muon = {name for name in parameters if f"{name}.momentum_buffer" in optimizer.tensors()}
    matrices = {name for name, one in parameters.items() if one.ndim == 2}
    assert by_muon == matrices - {"lm_head.weight"}
    assert f"{next(iter(by_muon))}.exp_avg" not in optimizer.tensors()
    moved = _moved(parameters)
    for name in by_muon:
        assert 0.05 < moved[name] / moved["lm_head.weight"] < 2, name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_state_that_is_loaded_goes_on_to_the_same_bits(kind: str) -> None:
    parameters, optimizer = _make(optimizer=kind, pull_to_start=0.5)
    _steps(parameters, optimizer, range(3))
    others, resumed = _make(optimizer=kind, pull_to_start=0.5)
    with torch.no_grad():
        for name, one in others.items():
            one.copy_(parameters[name])
    resumed.load(optimizer.tensors())
    assert all(value.dtype == torch.float32 for value in optimizer.tensors().values())
    _steps(parameters, optimizer, range(3, 6))
    _steps(others, resumed, range(3, 6))
    assert all(torch.equal(one, others[name]) for name, one in parameters.items())


def test_without_gradients_weights_return_to_their_start_at_the_rate_of_their_part() -> None:
    rates = {**_RATES, "head": 0.5}
    parameters, optimizer = _make(pull_to_start=4.0, weight_decay=0.0, learning_rate=0.05, rates=rates)
    start = {name: one.detach().clone() for name, one in parameters.items()}
    with torch.no_grad():
        for one in parameters.values():
            one.add_(1.0)
            one.grad = torch.zeros_like(one)
    optimizer.step(0.5)
    for name, one in parameters.items():
        left = 1 - 0.05 * 0.5 * rates[part_of(name)] * 4
        torch.testing.assert_close(one.detach() - start[name], torch.full_like(one, left))


def test_gradients_are_clipped_together_and_their_norm_is_told() -> None:
    parameters, optimizer = _make(max_gradient_norm=0.5)
    for one in parameters.values():
        one.grad = torch.ones_like(one)
    whole = sum(one.numel() for one in parameters.values()) ** 0.5
    assert optimizer.clip() == pytest.approx(whole)
    clipped = sum(float(one.grad.square().sum()) for one in parameters.values() if one.grad is not None)
    assert clipped**0.5 == pytest.approx(0.5, rel=1e-4)
