"""One shard with sampled and greedy replies: each kind is judged by its own sampling."""

import json
from collections.abc import Callable

import pytest
import torch

from eagle3_pipeline.extraction.head import Head
from eagle3_pipeline.extraction.meaning import Meaning
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.extraction.shard_meaning import ShardMeaning, since
from eagle3_pipeline.recipe.generation import Generation
from tests.extraction.noise import NoisyLlama, Recorded

SAMPLED, GREEDY = 100, 20
Last = Callable[[int], torch.Tensor]


@pytest.fixture(scope="module")
def samples(llama: NoisyLlama) -> list[Recorded]:
    """The greedy replies come first, as in the first shard of a recipe."""
    greedy = llama.record(GREEDY, prompt=6, completion=24, do_sample=False)
    return greedy + llama.record(SAMPLED, prompt=6, completion=24, do_sample=True, top_k=0)


def _meaning(head: Head) -> ShardMeaning:
    planned = [PlannedSample(f"{number}-t0", [], [], number < GREEDY) for number in range(SAMPLED + GREEDY)]
    return ShardMeaning(head, planned, Generation(temperature=1.0), seed=0)


def _look(meaning: ShardMeaning | Meaning, samples: list[Recorded], last: Last, first: int = 0) -> None:
    for number, one in list(enumerate(samples))[first:]:
        meaning.look(f"{number}-t0", one.token_ids, one.loss_mask, last(number))


def test_a_shard_with_greedy_and_sampled_replies_passes_though_by_one_sampling_it_would_not(
    llama: NoisyLlama, samples: list[Recorded]
) -> None:
    head = Head(llama.weights)

    def right(number: int) -> torch.Tensor:
        return samples[number].states[:, -1]

    meaning = _meaning(head)
    _look(meaning, samples, right)
    assert meaning.verdict() is None
    facts = meaning.facts()
    assert [facts[kind]["states"] for kind in ("sampled", "greedy")] == [SAMPLED, 6 * GREEDY]
    assert facts["greedy"]["agreed_share"] > facts["sampled"]["agreed_share"] + 0.3
    as_if_sampled = Meaning(head, temperature=1.0, top_p=1.0, top_k=-1, samples=GREEDY, seed=0)
    _look(as_if_sampled, samples[:GREEDY], right)
    assert as_if_sampled.verdict() is not None


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("wrong", ["a row late", "another sample's"])
def test_wrong_states_of_either_kind_are_found_among_right_ones_of_the_other(
    kind: str, wrong: str, llama: NoisyLlama, samples: list[Recorded]
) -> None:
    def last(number: int) -> torch.Tensor:
        if (number < GREEDY) != (kind == "greedy"):
            return samples[number].states[:, -1]
        if wrong == "a row late":
            return samples[number].states[:, -1].roll(1, dims=0)
        return samples[number - 1].states[:, -1]

    meaning = _meaning(Head(llama.weights))
    _look(meaning, samples, last)
    assert str(meaning.verdict()).endswith(f"when it wrote these samples ({kind} replies)")


def test_what_was_counted_of_each_kind_goes_on_in_another_process(
    llama: NoisyLlama, samples: list[Recorded]
) -> None:
    head = Head(llama.weights)

    def last(number: int) -> torch.Tensor:
        return samples[number].states[:, -1]

    first, later, straight = (_meaning(head) for _ in range(3))
    _look(first, samples[:10], last)
    before = first.counts()
    _look(first, samples[:50], last, first=10)
    notes = [before, since(first.counts(), before)]
    for note in notes:
        later.add(json.loads(json.dumps(note)))
    _look(later, samples, last, first=50)
    _look(straight, samples, last)
    assert later.facts() == straight.facts()
