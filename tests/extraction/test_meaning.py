import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_pipeline.extraction.head import Head
from eagle3_pipeline.extraction.meaning import Meaning, states_per_sample
from tests.extraction.build import invent
from tests.extraction.noise import NoisyLlama, Recorded
from tests.extraction.target import HIDDEN as TARGET_HIDDEN
from tests.extraction.target import TARGET, make_target
from tests.fakes.states import expected_states

SETTINGS = [(0.0, 1.0, -1), (0.7, 1.0, -1), (1.0, 0.9, 20), (1.0, 0.9, -1)]
NAMES = ["greedy", "temperature", "top-p and top-k", "top-p"]


@pytest.fixture(scope="module", params=SETTINGS, ids=NAMES)
def recorded(request: pytest.FixtureRequest, llama: NoisyLlama) -> tuple[dict[str, Any], list[Recorded]]:
    """Sampling settings, and 100 samples that the model wrote with them, sampled by transformers."""
    temperature, top_p, top_k = request.param
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": max(top_k, 0)}
    samples = llama.record(100, prompt=6, completion=16, **sampling)
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k}, samples


def _look(
    head: Head, sampling: dict[str, Any], samples: list[Recorded], last: Callable[[int], torch.Tensor]
) -> Meaning:
    meaning = Meaning(head, **sampling, samples=32, seed=0)
    for number, sample in enumerate(samples):
        meaning.look(f"{number}-t0", sample.token_ids, sample.loss_mask, last(number))
    return meaning


def test_the_states_of_what_the_target_wrote_mean_it(
    llama: NoisyLlama, recorded: tuple[dict[str, Any], list[Recorded]]
) -> None:
    sampling, samples = recorded
    meaning = _look(Head(llama.weights), sampling, samples, lambda number: samples[number].states[:, -1])
    assert meaning.verdict() is None
    facts = meaning.facts()
    assert facts["states"] == 400
    assert facts["bound"] < 0.09


@pytest.mark.parametrize(
    "wrong", ["a row late", "a row early", "after the norm", "another sample's", "a layer early"]
)
def test_states_that_are_not_the_last_ones_before_the_norm_of_these_tokens_are_found(
    wrong: str, llama: NoisyLlama, recorded: tuple[dict[str, Any], list[Recorded]]
) -> None:
    sampling, samples = recorded
    makers: dict[str, Callable[[int], torch.Tensor]] = {
        "a row late": lambda number: samples[number].states[:, -1].roll(1, dims=0),
        "a row early": lambda number: samples[number].states[:, -1].roll(-1, dims=0),
        "after the norm": lambda number: llama.model.model.norm(samples[number].states[:, -1]).detach(),
        "another sample's": lambda number: samples[number - 1].states[:, -1],
        "a layer early": lambda number: samples[number].states[:, -2],
    }
    verdict = _look(Head(llama.weights), sampling, samples, makers[wrong]).verdict()
    assert verdict is not None
    assert "not what the target had before its final norm" in verdict


def test_a_penalty_of_the_models_own_defaults_is_borne_and_wrong_states_are_found_all_the_same(
    llama: NoisyLlama, tmp_path: Path
) -> None:
    llama.model.save_pretrained(tmp_path)
    assert not Head.read(tmp_path).penalised
    for default in ({"repetition_penalty": 1.1}, {"min_p": 0.05}):
        (tmp_path / "generation_config.json").write_text(json.dumps(default))
        assert Head.read(tmp_path).penalised
    samples = llama.record(100, prompt=6, completion=16, do_sample=True, top_k=0, repetition_penalty=1.2)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}

    def verdict(last: Callable[[int], torch.Tensor]) -> str | None:
        return _look(Head.read(tmp_path), sampling, samples, last).verdict()

    assert verdict(lambda number: samples[number].states[:, -1]) is None
    assert verdict(lambda number: samples[number - 1].states[:, -1]) is not None
    assert verdict(lambda number: samples[number].states[:, -1].roll(1, dims=0)) is not None


def test_only_states_before_completion_tokens_are_looked_at_and_no_more_than_asked(llama: NoisyLlama) -> None:
    (sample,) = llama.record(1, prompt=6, completion=16, do_sample=False)
    broken = sample.states[:, -1].clone()
    broken[:5] = broken[21:] = torch.nan  # before the last prompt token, and the last token itself
    meaning = Meaning(Head(llama.weights), temperature=1.0, top_p=1.0, top_k=-1, samples=8, seed=0)
    meaning.look("0-t0", sample.token_ids, sample.loss_mask, broken)
    assert meaning.facts()["states"] == 16
    assert meaning.facts()["agreed_share"] > 0.9
    assert [states_per_sample(samples) for samples in (0, 1, 32, 100, 500, 10**5)] == [32, 32, 4, 1, 1, 1]


def test_the_choice_of_states_follows_from_the_seed_alone(llama: NoisyLlama) -> None:
    samples = llama.record(20, prompt=4, completion=40, do_sample=True)
    head = Head(llama.weights)

    def found(seed: int, order: int) -> dict[str, Any]:
        meaning = Meaning(head, temperature=1.0, top_p=1.0, top_k=-1, samples=32, seed=seed)
        for number in range(20)[::order]:
            sample = samples[number]
            meaning.look(f"{number}-t0", sample.token_ids, sample.loss_mask, sample.states[:, -1])
        return meaning.facts()

    assert found(0, 1) == found(0, -1)
    assert found(0, 1) != found(1, 1)


@pytest.fixture(scope="module")
def long_ones(llama: NoisyLlama) -> list[Recorded]:
    return llama.record(100, prompt=6, completion=40, do_sample=True, top_k=0)


def _after(
    agreed: int, llama: NoisyLlama, samples: list[Recorded], last: torch.Tensor | None = None
) -> Meaning:
    """Samples are looked at after 400 states of which so many agreed, where 100 are expected, give or take 7.

    `last` takes the place of the states of each.
    """
    found = Meaning(Head(llama.weights), temperature=1.0, top_p=1.0, top_k=-1, samples=32, seed=0)
    found.add({"states": 400, "agreed": agreed, "expected": 100.0, "variance": 50.0})
    for number, sample in enumerate(samples):
        states = sample.states[:, -1] if last is None else last
        found.look(f"{number}-t0", sample.token_ids, sample.loss_mask, states)
    return found


def test_a_shard_that_chance_put_outside_the_bound_is_saved_by_its_other_states(
    llama: NoisyLlama, long_ones: list[Recorded]
) -> None:
    right = _after(60, llama, long_ones)
    facts = right.facts()
    assert facts["expected_share"] - facts["agreed_share"] > facts["bound"]
    assert right.verdict() is None


def test_wrong_states_are_saved_by_no_second_look(llama: NoisyLlama, long_ones: list[Recorded]) -> None:
    wrong = _after(75, llama, long_ones, last=long_ones[0].states[:, -1])
    assert wrong.verdict() is not None
    assert wrong.verdict() == wrong.verdict()


def test_wrong_states_in_the_parts_of_an_earlier_process_are_not_outweighed_by_right_ones(
    llama: NoisyLlama, long_ones: list[Recorded]
) -> None:
    assert _after(0, llama, long_ones).verdict() is not None
    assert _after(20, llama, long_ones).verdict() is not None


@pytest.mark.parametrize(("agreed", "is_right"), [(72, True), (65, False)], ids=["4.0 errors", "4.9"])
def test_without_states_for_a_second_look_the_first_may_be_as_far_off_as_chance_ever_puts_it(
    agreed: int, is_right: bool, llama: NoisyLlama
) -> None:
    assert (_after(agreed, llama, []).verdict() is None) == is_right


def test_states_for_a_second_look_are_of_all_samples_and_bounded(
    llama: NoisyLlama, long_ones: list[Recorded]
) -> None:
    sample = long_ones[0]
    meaning = Meaning(Head(llama.weights), temperature=1.0, top_p=1.0, top_k=-1, samples=2000, seed=0)
    for number in range(2000):
        meaning.look(f"{number}-t0", sample.token_ids, sample.loss_mask, sample.states[:, -1])
    assert [len(states) for states in meaning._reserve.states] == [2] * 2000


def test_what_was_counted_goes_on_in_another_process(llama: NoisyLlama) -> None:
    samples = llama.record(30, prompt=4, completion=16, do_sample=True)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    head = Head(llama.weights)

    def looked(first: int, beyond: int) -> Meaning:
        meaning = Meaning(head, **sampling, samples=32, seed=0)
        for number in range(first, beyond):
            one = samples[number]
            meaning.look(f"{number}-t0", one.token_ids, one.loss_mask, one.states[:, -1])
        return meaning

    later = looked(10, 30)
    later.add(json.loads(json.dumps(looked(0, 10).counts())))
    assert later.facts() == looked(0, 30).facts()


def test_one_odd_token_among_few_states_is_no_verdict_and_none_at_all_neither(tmp_path: Path) -> None:
    head = Head.read(make_target(tmp_path))
    meaning = Meaning(head, temperature=1.0, top_p=1.0, top_k=-1, samples=8, seed=0)
    assert meaning.verdict() is None
    ids = torch.tensor(invent(0, 5).token_ids)
    last = torch.tensor(expected_states(ids.tolist(), (4,), TARGET_HIDDEN, TARGET))[:, 0].to(torch.bfloat16)
    mask = torch.arange(len(ids)) >= 3
    odd = ids.clone()
    odd[5] = 400
    meaning.look("5-t0", odd, mask, last)
    assert meaning.verdict() is None
    assert meaning.facts()["agreed_share"] == 0.9
    odd[7] = 400
    meaning.look("6-t0", odd, mask, last)
    assert meaning.verdict() is not None


def test_the_stand_ins_states_mean_their_tokens_and_others_are_found(tmp_path: Path) -> None:
    head = Head.read(make_target(tmp_path))
    samples = [torch.tensor(invent(0, index).token_ids) for index in range(10)]

    def verdict(of: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
        meaning = Meaning(head, temperature=0.7, top_p=1.0, top_k=-1, samples=8, seed=0)
        for number, ids in enumerate(samples):
            states = torch.tensor(expected_states(ids.tolist(), (4,), TARGET_HIDDEN, TARGET))[:, 0]
            meaning.look(str(number), ids, torch.arange(len(ids)) >= 3, of(states).to(torch.bfloat16))
        return meaning.verdict()

    norm = torch.tensor(TARGET.norm)
    assert verdict(lambda states: states) is None
    assert verdict(lambda states: states.roll(1, dims=0)) is not None
    assert verdict(lambda states: states / states.square().mean(1, keepdim=True).sqrt() * norm) is not None
