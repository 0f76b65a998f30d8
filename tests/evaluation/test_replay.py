import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import Busy, MissingInput, QualityError
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.replay import Conversation, Replay, conversations_that_judged, replay
from eagle3_pipeline.samples import SAMPLES_NAME, Sample, write_samples
from tests.evaluation.counting_server import CountingServer, counting_server
from tests.evaluation.judges import judging
from tests.release.made import made_lineage


def conversations(tmp_path: Path, samples: Sequence[Sample], **sections: Any) -> list[Conversation]:
    return conversations_that_judged(made_lineage(tmp_path, samples, **sections))


def conversation(first: int, reply: int = 12) -> Conversation:
    sample = judging(str(first), first, reply=reply)
    return Conversation(sample.sample_id, tuple(sample.prompt_token_ids), tuple(sample.completion_token_ids))


def run(server: CountingServer, asked: list[Conversation], speculative_tokens: int = 3) -> Replay:
    return replay(
        server,  # type: ignore[arg-type]
        asked,
        speculative_tokens=speculative_tokens,
        request_timeout_s=5,
    )


def test_each_turn_of_a_validation_prompt_judged(tmp_path: Path) -> None:
    later = judging("a", 3, sample_id="a-t1", turn=1)
    found = conversations(tmp_path, [judging("a", 1), later, judging("b", 2)])
    assert [one.sample_id for one in found] == ["a-t0", "a-t1", "b-t0"]
    assert found[0].prompt_token_ids == (1, 5, 6)
    assert found[0].reply_token_ids == tuple(range(12, 24))


def test_samples_of_other_prompts_did_not_judge(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path, [judging("a", 1)])
    path = lineage.synthetic_samples(lineage.recipe.shards[0]).folder / SAMPLES_NAME
    write_samples(path, [judging("a", 1), judging("other", 2)])
    assert [one.sample_id for one in conversations_that_judged(lineage)] == ["a-t0"]


@pytest.mark.parametrize(("trains", "names"), [(True, ["a-t0", "b-t0"]), (False, ["a-t0"])])
def test_the_verdict_decides_as_it_does_in_training(tmp_path: Path, trains: bool, names: list[str]) -> None:
    samples = [
        judging("a", 1),
        judging("b", 2, verdict="truncated", finish_reason="length"),
        judging("c", 3, verdict="degenerate"),
    ]
    found = conversations(tmp_path, samples, generation={"train_truncated": trains})
    assert [one.sample_id for one in found] == names


def test_a_reply_is_as_long_as_its_states(tmp_path: Path) -> None:
    extraction = {"layers": [1, 2, 3, 4], "max_sample_tokens": 8}
    (found,) = conversations(tmp_path, [judging("a", 1)], extraction=extraction)
    assert found.prompt_token_ids == (1, 5, 6)
    assert found.reply_token_ids == tuple(range(12, 17))


def test_states_that_came_with_the_reply_lack_its_last_token(tmp_path: Path) -> None:
    extraction = {"layers": [1, 2, 3, 4], "while_generating": True}
    sections = {"extraction": extraction, "generation": {"temperature": 0.0}}
    (found,) = conversations(tmp_path, [judging("a", 1)], **sections)
    assert found.reply_token_ids == tuple(range(12, 23))


@pytest.mark.parametrize(("longest", "judged"), [(3, 0), (4, 0), (5, 1)])
def test_a_reply_without_a_token_to_propose_did_not_judge(tmp_path: Path, longest: int, judged: int) -> None:
    extraction = {"layers": [1, 2, 3, 4], "max_sample_tokens": longest}
    assert len(conversations(tmp_path, [judging("a", 1)], extraction=extraction)) == judged


def test_without_validation_prompts_nothing_is_read(tmp_path: Path) -> None:
    assert conversations(tmp_path, []) == []


def test_samples_that_are_gone_are_named(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path, [judging("a", 1)])
    place = lineage.synthetic_samples(lineage.recipe.shards[0])
    (place.folder / "manifest.json").unlink()
    with pytest.raises(MissingInput, match="synthetic_samples"):
        conversations_that_judged(lineage)


def test_the_server_gets_the_very_ids_greedily_and_several_at_a_time() -> None:
    with counting_server(delay_s=0.02) as server:
        run(server, [conversation(1), conversation(2, reply=7)])
        assert server.most_in_flight == 2
    assert sorted(server.requests, key=lambda body: body["prompt"]) == [
        {
            "model": server.model,
            "prompt": [first, 5, 6],
            "max_tokens": tokens,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        for first, tokens in ((1, 12), (2, 7))
    ]


def test_replies_that_are_the_recorded_ones_are_counted() -> None:
    other = Conversation("x", (7, 8), (1, 2, 3))
    with counting_server() as server:
        found = run(server, [conversation(1), conversation(2), other])
    assert (found.served, found.same) == (3, 2)


def test_c59_only_these_conversations_are_in_the_counts() -> None:
    with counting_server() as server:
        run(server, [conversation(3)])
        found = run(server, [conversation(1), conversation(2)])
    assert found.acceptance is not None
    # every reply is its first token and 1 + accepted tokens for each draft
    assert found.tokens == 24
    assert found.tokens == 2 + found.acceptance.drafts + found.acceptance.accepted_tokens
    assert found.behind_the_end == 0


def test_tokens_that_no_reply_has_are_those_behind_the_end() -> None:
    counts = AcceptanceCounts(10, 30, 9, (5, 3, 1))  # two replies of 2 + 10 + 9 tokens, cut to 18
    assert Replay(served=2, refused=0, same=2, tokens=18, acceptance=counts).behind_the_end == 3


def test_a_conversation_that_the_server_refuses_is_left_out_and_counted() -> None:
    long = Conversation("long", tuple(range(20)), (1, 2, 3))
    with counting_server(longest_prompt=10) as server:
        found = run(server, [long, conversation(1)])
        nothing = run(server, [long])
    assert (found.served, found.refused, found.same) == (1, 1, 1)
    assert nothing == Replay(served=0, refused=1, same=0, tokens=0, acceptance=None)


def test_another_user_of_the_server_is_noticed() -> None:
    with counting_server(foreign_tokens=4) as server, pytest.raises(Busy, match="validation conversations"):
        run(server, [conversation(1)])


def test_another_number_of_speculative_tokens_is_noticed() -> None:
    with counting_server() as server, pytest.raises(QualityError, match="3 positions"):
        run(server, [conversation(1)], speculative_tokens=2)


@pytest.mark.parametrize("counts", [AcceptanceCounts(3, 9, 3, (2, 1, 0)), None])
def test_a_replay_survives_json(counts: AcceptanceCounts | None) -> None:
    made = Replay(served=2, refused=1, same=1, tokens=9, acceptance=counts)
    assert Replay.from_json(json.loads(json.dumps(made.to_json()))) == made
