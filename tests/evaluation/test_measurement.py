import json
from typing import Any

import pytest

from eagle3_pipeline.errors import BadInput, Busy, QualityError, ServerDied, ServerError, ServerStalled
from eagle3_pipeline.evaluation import counting
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.measurement import Measurement, measure
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.recipe.evaluation import Evaluation
from tests.evaluation.counting_server import CountingServer, counting_server

TEXTS = ("Where do swallows sleep?", "Name three rivers.", "Why is bread chewy?", "One more", "And another")


def prompts(*texts: str, system: str | None = None) -> list[Prompt]:
    made = (Prompt.create((text, "a later turn"), system=system, source="test") for text in texts or TEXTS)
    return list(made)


def settings(**changes: Any) -> Evaluation:
    values = {"sets": [{"name": "x", "path": "x.jsonl"}], "max_completion_tokens": 12, "concurrency": 2}
    return Evaluation.model_validate(values | changes)


def run(server: CountingServer, asked: list[Prompt] | None = None, **changes: Any) -> Measurement:
    with_draft = changes.pop("with_draft", server.drafts)
    seed = changes.pop("seed", None)
    return measure(
        server,  # type: ignore[arg-type]
        prompts() if asked is None else asked,
        settings(**changes),
        name="x",
        with_draft=with_draft,
        request_timeout_s=5,
        seed=seed,
    )


def test_replies_are_kept_as_token_ids_and_counted() -> None:
    with counting_server() as server:
        measured = run(server)
    assert list(measured.replies) == [prompt.prompt_id for prompt in prompts()]
    assert all(len(ids) == 12 for ids in measured.replies.values())
    assert measured.answered == 5
    assert measured.output_tokens == 60
    assert measured.tokens_per_second == pytest.approx(60 / measured.wall_seconds)
    assert measured.seconds_per_output_token == pytest.approx(measured.request_seconds / 60)


def test_c59_the_warm_up_is_in_no_number() -> None:
    with counting_server() as server:
        measured = run(server)
        everything = sum(engine.drafts for engine in server.engines)
        assert len(server.requests) == 3 + 5
    assert measured.acceptance is not None
    assert 0 < measured.acceptance.drafts < everything
    # every reply is its first token and 1 + accepted tokens for each draft
    assert measured.output_tokens == 5 + measured.acceptance.drafts + measured.acceptance.accepted_tokens


def test_c59_an_engine_that_is_missing_from_the_positions_is_noticed() -> None:
    with counting_server(hidden_engine=True) as server, pytest.raises(QualityError, match="contradict"):
        run(server)


def test_counts_that_come_after_the_reply_are_waited_for() -> None:
    with counting_server(late_counting=True) as server:
        measured = run(server)
    assert measured.acceptance is not None
    assert measured.output_tokens == 5 + measured.acceptance.drafts + measured.acceptance.accepted_tokens


def test_a_server_that_drafts_nothing_gives_no_acceptance_of_one() -> None:
    with counting_server(drafts=False) as server, pytest.raises(QualityError, match="counted 0 drafts"):
        run(server, with_draft=True)


def test_counters_that_never_move_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_REST_LIMIT_S", 0.1)
    with counting_server(counting=False) as server, pytest.raises(QualityError, match="did not move"):
        run(server)


def test_without_a_draft_there_is_no_acceptance() -> None:
    with counting_server(drafts=False) as server:
        assert run(server).acceptance is None


def test_another_number_of_speculative_tokens_than_the_recipes_is_noticed() -> None:
    with counting_server(speculative_tokens=2) as server, pytest.raises(QualityError, match="2 positions"):
        run(server)


def test_requests_are_what_the_recipe_says_and_the_first_turn_is_used() -> None:
    with counting_server() as server:
        run(server, prompts("Hello", system="Be brief."), temperature=0.5)
        assert server.requests[-1] == {
            "model": server.model,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            "max_tokens": 12,
            "temperature": 0.5,
            "cache_salt": server.requests[-1]["cache_salt"],
            "return_token_ids": True,
        }


def test_the_prompts_are_kept_as_the_server_made_them() -> None:
    with counting_server() as server:
        (made,) = run(server, prompts("Hello")).prompts.values()
    assert made == tuple(map(ord, "Hello"))


def test_no_measurement_finds_its_prompts_in_the_prefix_cache() -> None:
    with counting_server() as server:
        run(server)
        run(server)
        salts = [body["cache_salt"] for body in server.requests]
    parts = [set(salts[first:last]) for first, last in ((0, 3), (3, 8), (8, 11), (11, 16))]
    assert [len(part) for part in parts] == [1, 1, 1, 1]
    assert len(set.union(*parts)) == 4


def test_the_warm_up_fills_as_many_places_as_the_measurement() -> None:
    with counting_server() as server:
        run(server, concurrency=4)
        assert len(server.requests) == 4 + 5


def seeds(seed: int | None, **changes: Any) -> list[int | None]:
    with counting_server() as server:
        run(server, seed=seed, concurrency=1, temperature=0.7, **changes)
        warm_up, measured = server.requests[:3], server.requests[3:]
    assert not any("seed" in body for body in warm_up)
    return [body.get("seed") for body in measured]


def test_sampled_replies_have_a_seed_by_prompt_and_repeat_that_is_the_same_again() -> None:
    first, second = seeds(0), seeds(1)
    assert seeds(0) == first
    assert len({*first, *second}) == 10
    assert all(isinstance(seed, int) and 0 <= seed < 2**32 for seed in first)


def test_greedy_replies_and_servers_that_die_of_a_seed_get_none() -> None:
    assert seeds(None) == [None] * 5
    with counting_server() as server:
        run(server, seed=0)
        assert not any("seed" in body for body in server.requests)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_never_more_requests_are_in_flight_than_the_recipe_says(concurrency: int) -> None:
    with counting_server(delay_s=0.02) as server:
        run(server, concurrency=concurrency)
        assert server.most_in_flight == concurrency


def test_c08_a_prompt_that_is_too_long_is_left_out_by_name_and_asked_once() -> None:
    asked = prompts("far too long", *TEXTS)
    with counting_server() as server:
        measured = run(server, asked)
        sent = [body["messages"][-1]["content"] for body in server.requests]
    assert measured.refused == (asked[0].prompt_id,)
    assert len(measured.replies) == 5
    assert sent.count("far too long") == 2  # the warm-up and the measurement


def test_a_set_whose_prompts_are_all_refused_is_an_error() -> None:
    with counting_server() as server, pytest.raises(BadInput, match="1 of 1 prompts refused"):
        run(server, prompts("too long"))


def test_an_empty_set_is_an_error() -> None:
    with counting_server() as server, pytest.raises(BadInput, match="no prompts"):
        run(server, [])


def test_somebody_else_on_the_server_spoils_the_measurement_and_it_says_so() -> None:
    with counting_server(foreign_tokens=4) as server, pytest.raises(Busy, match="somebody else"):
        run(server)


def test_a_death_of_the_server_is_told_with_its_cause() -> None:
    with counting_server(status=500, dead=True) as server, pytest.raises(ServerDied, match="out of memory"):
        run(server)


def test_an_error_of_a_living_server_is_told_with_its_words() -> None:
    with counting_server(status=503) as server, pytest.raises(ServerError, match="HTTP 503"):
        run(server)


def test_a_connection_that_breaks_is_told_and_the_request_is_not_sent_again() -> None:
    with counting_server(hang_up=True) as server:
        with pytest.raises(ServerError, match="gave no reply"):
            run(server, concurrency=1)
        assert len(server.requests) == 1


@pytest.mark.parametrize(("dead", "kind"), [(True, ServerDied), (False, ServerStalled)])
def test_a_server_that_is_gone_is_told(dead: bool, kind: type[ServerError]) -> None:
    with counting_server(dead=dead) as server:
        pass
    with pytest.raises(kind):
        run(server)


def test_a_measurement_survives_json() -> None:
    counts = AcceptanceCounts(3, 9, 3, (2, 1, 0))
    measured = Measurement({"a": (1, 2)}, {"a": (3,)}, 1, ("b",), 2, 1.5, 1.25, counts)
    assert Measurement.from_json(json.loads(json.dumps(measured.to_json()))) == measured
