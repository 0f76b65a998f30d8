"""What is counted, and what is held out."""

from collections import Counter

import pytest

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.samples import Sample
from eagle3_pipeline.samples.sample import Verdict
from eagle3_pipeline.vocabulary.counts import gather_replies


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


def test_only_completions_of_samples_that_train_are_counted() -> None:
    samples = [
        _sample("a", [1, 1, 2]),
        _sample("b", [3], "truncated"),
        _sample("c", [9] * 50, "degenerate"),
        _sample("d", [], "refused"),
    ]
    assert gather_replies(samples, (), True, 10).counts == Counter({1: 2, 2: 1, 3: 1})
    assert gather_replies(samples, (), False, 10).counts == Counter({1: 2, 2: 1})


def test_usable_replies_to_validation_prompts_are_held_out_in_every_turn_and_never_counted() -> None:
    samples = [
        _sample("judge", [4, 5]),
        _sample("judge", [6], turn=1),
        _sample("judge-t0", [8]),  # another prompt
        _sample("looping", [9] * 50, "degenerate"),
    ]
    replies = gather_replies(samples, {"judge", "looping"}, True, 10)
    assert replies.counts == Counter({8: 1})
    assert [reply.tolist() for reply in replies.held_out] == [[4, 5], [6]]


@pytest.mark.parametrize("token", [12, -1])
@pytest.mark.parametrize("judges", [(), ("b",)])
def test_a_token_that_the_target_does_not_have_is_refused_by_the_name_of_the_sample(
    token: int, judges: tuple[str, ...]
) -> None:
    samples = [_sample("a", [1]), _sample("b", [1, token])]
    with pytest.raises(BadInput, match=rf"b-t0 has the token id {token} .* the target has 10 tokens"):
        gather_replies(samples, judges, True, 10)
