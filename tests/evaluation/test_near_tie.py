from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.errors import QualityError, ServerDied, ServerError
from eagle3_pipeline.evaluation.near_tie import Likeliest, Parting, Place, ask_target, described, partings
from tests.evaluation.counting_server import CountingServer, counting_server

REPLIES = st.lists(st.integers(0, 3), min_size=1, max_size=8)


def ask(
    server: CountingServer,
    places: Sequence[Place],
    prompts: Mapping[str, Sequence[int]] | None = None,
    replies: Mapping[str, Sequence[int]] | None = None,
) -> dict[Place, Likeliest]:
    return ask_target(
        server,  # type: ignore[arg-type]
        prompts or {"a": (100, 101)},
        replies or {"a": (7, 8, 9)},
        places,
        request_timeout_s=5,
    )


@settings(deadline=None)
@given(REPLIES, REPLIES)
def test_replies_are_the_same_up_to_where_they_part(one: list[int], other: list[int]) -> None:
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter] and len(one) != len(other):
        with pytest.raises(QualityError, match="the shorter is the beginning of the longer"):
            partings({"a": one}, {"a": other}, ["a"])
        return
    found = partings({"a": one}, {"a": other}, ["a"])
    assert len(found) == (one != other)
    for parting in found:
        assert one[: parting.position] == other[: parting.position]
        assert parting.tokens == (one[parting.position], other[parting.position])
        assert parting.tokens[0] != parting.tokens[1]


def test_partings_come_in_the_order_of_the_names_and_of_these_only() -> None:
    one, other = {"a": [1], "b": [1], "c": [1], "d": [1]}, {"a": [2], "b": [2], "c": [1], "d": [2]}
    found = partings(one, other, ["b", "c", "a"])
    assert [parting.place for parting in found] == [("b", 0), ("a", 0)]


@pytest.mark.parametrize(
    ("tokens", "gap"),
    [
        ((1, 2), 0.25),  # either is the likeliest
        ((2, 1), 0.25),
        ((2, 3), 2.0),  # none is: the less likely one is behind the likeliest of all
        ((1, 9), 4.0),  # not among those that are told: as far behind as the last
        ((8, 9), 4.0),
    ],
)
def test_the_gap_is_what_the_less_likely_token_is_behind_the_likeliest(
    tokens: tuple[int, int], gap: float
) -> None:
    assert Parting("a", 0, tokens).gap({1: -0.5, 2: -0.75, 3: -2.5, 4: -4.5}) == gap


def test_the_target_is_asked_for_the_token_after_what_both_replies_have() -> None:
    with counting_server(likeliest=lambda prompt: {sum(prompt): -0.1, 5: -2.0}) as server:
        told = ask(server, [("a", 0), ("a", 2)])
    assert told == {("a", 0): {201: -0.1, 5: -2.0}, ("a", 2): {216: -0.1, 5: -2.0}}
    assert sorted(server.requests, key=lambda body: len(body["prompt"])) == [
        {
            "model": server.model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 20,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
        for prompt in ([100, 101], [100, 101, 7, 8])
    ]


def test_a_server_without_log_probabilities_is_told_with_the_setting_that_may_be_the_cause() -> None:
    with counting_server() as server, pytest.raises(ServerError, match=r"a, token 2, .*--max-logprobs"):
        ask(server, [("a", 1)])


def test_a_place_that_the_server_refuses_is_told() -> None:
    with (
        counting_server(longest_prompt=2, likeliest=lambda prompt: {1: -0.1}) as server,
        pytest.raises(ServerError, match="gave no log-probabilities for a, token 3"),
    ):
        ask(server, [("a", 2)])


def test_a_server_that_died_is_told_as_that() -> None:
    with counting_server(status=500, dead=True) as server, pytest.raises(ServerDied, match="out of memory"):
        ask(server, [("a", 1)])


def test_a_token_is_described_by_its_text_and_id_and_by_the_id_where_the_server_does_not_tell() -> None:
    with counting_server() as server:
        assert described(server, 12) == "'t12' (id 12)"  # type: ignore[arg-type]
        server.status = 404
        assert described(server, 12) == "id 12"  # type: ignore[arg-type]
    assert described(server, 12) == "id 12"  # type: ignore[arg-type]
