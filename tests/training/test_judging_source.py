"""The labels of samples that judge are the target's likeliest tokens, over its whole vocabulary."""

import logging
from collections.abc import Mapping, Sequence

import pytest
import torch

from eagle3_pipeline.extraction.head import Head
from eagle3_pipeline.training.batches import pack, supervised_rows
from eagle3_pipeline.training.forward import train_forward
from eagle3_pipeline.training.judging_source import JudgingSource
from eagle3_pipeline.training.validation import judge
from tests.training.tiny import DRAFT, VOCAB, Memory, draft, memory, target_weights

CPU = torch.device("cpu")
SIZES = [(30, 6), (21, 9), (40, 5), (16, 10)]


def _likeliest(states: torch.Tensor) -> torch.Tensor:
    """By float32, whole: `[T]`."""
    weights = target_weights()
    normed = torch.nn.functional.rms_norm(states.float(), weights.norm.shape, weights.norm, 1e-5)
    return (normed @ weights.head.T).argmax(-1)


def _greedy() -> Memory:
    """Samples whose replies are what the target takes for likeliest by their states."""
    source = memory(SIZES)
    for one in source.samples:
        chosen = _likeliest(one["hidden_states"][:, -1])
        ids, mask = one["token_ids"], one["loss_mask"]
        ids[1:][mask[1:]] = chosen[:-1][mask[1:]]
    return source


def _judging(source: Memory, judges: Sequence[int] = (0, 2)) -> JudgingSource:
    return JudgingSource(source, judges, lambda: Head(target_weights()), CPU)


def test_a_sample_that_judges_has_the_targets_choice_at_each_row_and_others_are_as_they_were() -> None:
    plain = memory(SIZES)
    source = _judging(plain)
    for index in (0, 2):
        sample = source.read(index)
        at = supervised_rows(sample["loss_mask"])
        wanted = _likeliest(sample["hidden_states"][at + 1, -1])
        assert (sample["choices"] == wanted).float().mean() > 0.9  # near ties in bfloat16 aside
        assert set(sample["choices"].tolist()) <= set(range(VOCAB))
    assert source.read(1) == plain.read(1)
    assert (len(source), source.name(3)) == (4, "sample-3")
    assert pack(source, [0]).labels.tolist() == source.read(0)["choices"].tolist()
    assert pack(source, [1]).labels.tolist() == pack(plain, [1]).labels.tolist()


def test_the_head_is_read_once_when_a_judge_is_read_and_never_for_samples_that_train() -> None:
    read: list[bool] = []

    def head() -> Head:
        read.append(True)
        return Head(target_weights())

    source = JudgingSource(memory(SIZES), [0, 2], head, CPU)
    source.read(1)
    assert read == []
    source.read(2)
    source.read(0)
    assert source.greedy_agreement < 1
    assert read == [True]


def test_greedy_replies_agree_and_others_are_warned_of_with_the_share(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert _judging(_greedy()).greedy_agreement > 0.95
        assert caplog.text == ""
        found = _judging(memory(SIZES)).greedy_agreement
    assert found < 0.3
    assert f"{100 * found:.1f} % of the tokens of the 2 replies that judge are the target's" in caplog.text


def test_a_proposal_is_right_where_it_is_the_targets_choice_whatever_the_text_says() -> None:
    model = draft()
    targets = model.d2t + torch.arange(DRAFT)

    class Proposed(JudgingSource):
        """The target chooses what the draft proposes first."""

        def read(self, index: int) -> Mapping[str, torch.Tensor]:
            sample = Memory.read(plain, index)
            (first, *_) = train_forward(model, pack(plain, [index]), 3, torch.float32)
            return {**sample, "choices": targets[first.proposals]}

    plain = memory(SIZES)
    source = Proposed(plain, [0, 2], lambda: Head(target_weights()), CPU)
    with torch.no_grad():
        batch = pack(source, [0, 2])
        judgement = judge([(train_forward(model, batch, 3, torch.float32), batch)], targets, 0.8)
    assert judgement.accuracy_by_position[0] == 1
    assert judgement.acceptance_by_position[0] == 1


def test_a_token_outside_the_drafts_vocabulary_is_never_right() -> None:
    model = draft()
    targets = model.d2t + torch.arange(DRAFT)
    outside = next(token for token in range(VOCAB) if token not in set(targets.tolist()))
    sample = memory([(30, 6)]).samples[0]
    rows = len(supervised_rows(sample["loss_mask"]))
    batch = pack(Memory([{**sample, "choices": torch.full((rows,), outside)}]), [0])
    with torch.no_grad():
        judgement = judge([(train_forward(model, batch, 3, torch.float32), batch)], targets, 0.8)
    assert judgement.acceptance_length == 1
