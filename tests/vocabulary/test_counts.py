"""What is counted, how far, and what is held out."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.extraction.plan import PlannedSample, plan_shard
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples import SAMPLES_NAME, Sample, write_samples
from eagle3_pipeline.samples.sample import Verdict
from eagle3_pipeline.vocabulary.counts import gather_replies, read_replies
from tests.generation.world import make_lineage


def _sample(prompt: str, completion: list[int], verdict: Verdict = "good", turn: int = 0) -> Sample:
    return Sample(
        sample_id=f"{prompt}-t{turn}",
        prompt_id=prompt,
        turn=turn,
        prompt_token_ids=[7, 7, 7],
        completion_token_ids=completion,
        finish_reason="stop",
        content="",
        reasoning="",
        usage={},
        sampling={},
        server="",
        verdict=verdict,
    )


def _planned(samples: list[Sample], train_truncated: bool = True) -> list[PlannedSample]:
    return plan_shard(samples, train_truncated=train_truncated, longest=100).samples


def test_only_completions_of_samples_that_train_are_counted() -> None:
    samples = [
        _sample("a", [1, 1, 2]),
        _sample("b", [3], "truncated"),
        _sample("c", [9] * 50, "degenerate"),
        _sample("d", [], "refused"),
    ]
    assert gather_replies(_planned(samples), (), 10).counts == Counter({1: 2, 2: 1, 3: 1})
    assert gather_replies(_planned(samples, False), (), 10).counts == Counter({1: 2, 2: 1})


@pytest.mark.parametrize(
    ("while_generating", "counts", "held_out"),
    [(False, {1: 2, 2: 1, 3: 1}, [4, 5, 6]), (True, {1: 2, 3: 1}, [4, 5])],
)
def test_replies_count_as_far_as_their_states_are_extracted(
    tmp_path: Path, while_generating: bool, counts: dict[int, int], held_out: list[int]
) -> None:
    extraction = {"layers": [1, 2, 3, 4], "max_sample_tokens": 6, "while_generating": while_generating}
    lineage = make_lineage(
        tmp_path, [1] * 4, 4, judges=1, extraction=extraction, generation={"temperature": 0.0}
    )
    target = lineage.target_model()
    target.finish([], {**target.require().facts, "vocab_size": 10})
    samples = [
        _sample("p0", [4, 5, 6]),
        _sample("p1", [1, 1, 2]),
        _sample("p2", [3, 9, 9, 9]),
        _sample("p3", [8, 8]),
    ]
    samples[2] = replace(samples[2], prompt_token_ids=[7] * 5)
    samples[3] = replace(samples[3], prompt_token_ids=[7] * 6)  # nothing is left of its reply
    _write(lineage, samples)
    replies = read_replies(lineage)
    assert replies.counts == Counter(counts)
    assert [reply.tolist() for reply in replies.held_out] == [held_out]


def _write(lineage: Lineage, samples: list[Sample]) -> None:
    place = lineage.synthetic_samples(lineage.recipe.shards[0])
    path = place.folder / SAMPLES_NAME
    write_samples(path, samples)
    place.finish([path], {})


def test_usable_replies_to_validation_prompts_are_held_out_in_every_turn_and_never_counted() -> None:
    samples = [
        _sample("judge", [4, 5]),
        _sample("judge", [6], turn=1),
        _sample("judge-t0", [8]),  # another prompt
        _sample("looping", [9] * 50, "degenerate"),
    ]
    replies = gather_replies(_planned(samples), {"judge", "looping"}, 10)
    assert replies.counts == Counter({8: 1})
    assert [reply.tolist() for reply in replies.held_out] == [[4, 5], [6]]


@pytest.mark.parametrize("token", [12, -1])
@pytest.mark.parametrize("judges", [(), ("b",)])
def test_a_token_that_the_target_does_not_have_is_refused_by_the_name_of_the_sample(
    token: int, judges: tuple[str, ...]
) -> None:
    samples = [_sample("a", [1]), _sample("b", [1, token])]
    with pytest.raises(BadInput, match=rf"b-t0 has the token id {token} .* the target has 10 tokens"):
        gather_replies(_planned(samples), judges, 10)
