from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.errors import DamagedFile, QualityError, RequestsTimedOut, ServerDied, ServerStalled
from eagle3_pipeline.generation.collection import open_shard
from eagle3_pipeline.generation.conversation import Conversation
from eagle3_pipeline.generation.first_replies import FirstReplies
from eagle3_pipeline.generation.reply import Unanswered
from eagle3_pipeline.generation.shard_generation import ShardGeneration
from eagle3_pipeline.journal import read_journal
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.samples import Sample, read_samples
from tests.generation.world import Answers, make_lineage, reply_to, run_job

STOPS = ("empty", "degenerate", "refused", "thinking")  # what a conversation ends at


def samples_of(lineage: Lineage) -> list[Sample]:
    places = [lineage.synthetic_samples(shard) for shard in lineage.recipe.shards]
    return [one for place in places for one in read_samples(place.folder / "samples.parquet")]


def journals_of(lineage: Lineage) -> list[Path]:
    paths = [lineage.synthetic_samples(shard).folder / "replies.jsonl" for shard in lineage.recipe.shards]
    return [path for path in paths if path.exists()]


def on_disk(lineage: Lineage) -> set[str]:
    names = {record["sample_id"] for path in journals_of(lineage) for record in read_journal(path)}
    for shard in lineage.recipe.shards:
        place = lineage.synthetic_samples(shard)
        if place.manifest():
            names |= {one.sample_id for one in read_samples(place.folder / "samples.parquet")}
    return names


def expected_ids(turns: list[int], kinds: dict[str, str]) -> list[str]:
    names = []
    for number, count in enumerate(turns):
        for turn in range(count):
            names.append(f"p{number}-t{turn}")
            if kinds.get(names[-1]) in STOPS:
                break
    return names


def dies_after(replies: int) -> Any:
    left = [replies]

    def before(name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise ServerDied("the server is gone")

    return before


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[int], int, dict[str, str], dict[str, int], list[tuple[int, float]]]:
    per_shard = draw(st.integers(1, 3))
    turns = draw(st.lists(st.integers(1, 3), min_size=per_shard, max_size=3 * per_shard))
    turns = turns[: len(turns) - len(turns) % per_shard]
    names = [f"p{number}-t{turn}" for number, count in enumerate(turns) for turn in range(count)]
    kinds = {name: draw(st.sampled_from(["good", "good", "truncated", *STOPS])) for name in names}
    delays = {name: draw(st.integers(0, 6)) for name in names}
    kills = draw(st.lists(st.tuples(st.integers(0, len(names)), st.floats(0, 1)), max_size=3))
    return turns, per_shard, kinds, delays, kills


@settings(deadline=None, max_examples=30)
@given(job=jobs())
def test_any_order_of_replies_and_any_kills_give_each_sample_once_and_ask_only_for_what_is_missing(
    job: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    turns, per_shard, kinds, delays, kills = job
    lineage = make_lineage(tmp_path_factory.mktemp("job"), turns, per_shard)
    expected = expected_ids(turns, kinds)
    for replies, cut in kills:
        client = Answers(kinds, delays, dies_after(replies))
        before = on_disk(lineage)
        with suppress(ServerDied):
            run_job(lineage, client)
        assert not before & set(client.asked)
        for path in journals_of(lineage):  # a kill: everything behind some byte was never written
            data = path.read_bytes()
            path.write_bytes(data[: round(cut * len(data))])
    missing = set(expected) - on_disk(lineage)
    client = Answers(kinds, delays)
    run_job(lineage, client)
    assert sorted(client.asked) == sorted(missing)
    assert [one.sample_id for one in samples_of(lineage)] == expected
    assert not journals_of(lineage)


def test_a_server_that_dies_at_5_of_50_leaves_45_to_do_and_marks_none_as_failed(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 50, 50)
    with pytest.raises(ServerDied):
        run_job(lineage, Answers(before=dies_after(5)))
    assert len(on_disk(lineage)) == 5
    client = Answers()
    run_job(lineage, client)
    assert len(client.asked) == len(set(client.asked)) == 45
    assert {one.verdict for one in samples_of(lineage)} == {"good"}


def test_a_shard_is_finished_while_others_are_still_asked_for(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 8, 2)
    slowest = {"p7-t0": 500}
    assert run_job(lineage, Answers(delays=slowest))[-1] == "p2-s003"


def test_the_server_stays_full_across_the_borders_of_shards(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 24, 2)
    client = Answers(delays={f"p{number}-t0": 1 + number % 5 for number in range(24)})
    run_job(lineage, client)
    # Less one: between a reply and the next request a slot changes hands.
    assert min(client.fewest_running[:-4]) >= lineage.recipe.generation.concurrency - 1


def test_a_conversation_goes_on_with_the_targets_own_content_without_its_thoughts(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [3], 1, system="be brief")
    client = Answers()
    run_job(lineage, client)
    assert client.conversations["p0-t2"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "p0.0"},
        {"role": "assistant", "content": "answer to p0.0"},
        {"role": "user", "content": "p0.1"},
        {"role": "assistant", "content": "answer to p0.1"},
        {"role": "user", "content": "p0.2"},
    ]


def test_a_torn_conversation_goes_on_from_its_recorded_turns(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [3], 1)
    with pytest.raises(ServerDied):
        run_job(lineage, Answers(before=dies_after(1)))
    client = Answers()
    run_job(lineage, client)
    assert client.asked == ["p0-t1", "p0-t2"]
    assert client.conversations["p0-t1"][1] == {"role": "assistant", "content": "answer to p0.0"}


def test_a_conversation_ends_at_a_reply_without_text_and_counts_what_was_not_asked(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [3, 2], 2)
    run_job(lineage, Answers({"p0-t0": "empty"}))
    assert [one.sample_id for one in samples_of(lineage)] == ["p0-t0", "p1-t0", "p1-t1"]
    assert lineage.synthetic_samples("p2-s000").require().facts["turns_not_asked"] == 2


def test_null_content_with_all_text_in_the_thoughts_is_a_truncated_sample(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1], 1)
    run_job(lineage, Answers({"p0-t0": "thinking"}))
    (sample,) = samples_of(lineage)
    assert (sample.verdict, sample.content, sample.reasoning) == ("truncated", "", "hmm")


def test_a_sample_holds_the_servers_ids_as_they_came(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1], 1)
    run_job(lineage, Answers())
    (sample,) = samples_of(lineage)
    assert sample.prompt_token_ids == [4]
    assert sample.completion_token_ids == [3, 4, 5, 2]


def test_a_request_that_is_given_up_stays_to_be_done_and_the_others_are_made(tmp_path: Path) -> None:
    def before(name: str) -> None:
        if name == "p1-t0":
            raise Unanswered("timeout", "no reply in 30 s", again=False)

    lineage = make_lineage(tmp_path, [1] * 4, 2)
    with pytest.raises(RequestsTimedOut, match=r"1 requests got no reply \(first p1-t0: timeout"):
        run_job(lineage, Answers(before=before))
    assert on_disk(lineage) == {"p0-t0", "p2-t0", "p3-t0"}
    assert lineage.synthetic_samples("p2-s001").manifest() is not None
    client = Answers()
    run_job(lineage, client)
    assert client.asked == ["p1-t0"]


def fails_at(*names: str) -> Any:
    def before(name: str) -> None:
        if name in names:
            raise Unanswered("HTTP 500", "cannot render", again=True, may_be_the_prompt=True)

    return before


def test_a_prompt_at_which_a_well_server_always_fails_is_a_counted_rejection(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 4, 2)
    run_job(lineage, Answers(before=fails_at("p1-t0")))
    assert [one.verdict for one in samples_of(lineage)] == ["good", "refused", "good", "good"]
    assert samples_of(lineage)[1].content == "HTTP 500: cannot render"


def test_a_server_that_answers_greetings_only_marks_no_prompt(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 40, 40)
    with pytest.raises(ServerStalled, match="5 requests in a row"):
        run_job(lineage, Answers(before=fails_at(*(f"p{number}-t0" for number in range(40)))))
    assert on_disk(lineage) == set()


def test_a_few_refusals_that_come_before_any_reply_stop_nothing(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 40, 40)
    kinds = {f"p{number}-t0": "refused" for number in range(20)}
    run_job(lineage, Answers(kinds, delays={f"p{number}-t0": 200 for number in range(20, 40)}), slots=30)
    assert len(samples_of(lineage)) == 40


def test_prompts_that_judge_are_asked_greedily_in_every_turn_and_their_samples_say_so(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [2, 1, 1, 3, 1, 1], 3, judges=2)
    client = Answers({"p1-t0": "refused"}, before=dies_after(1))
    with pytest.raises(ServerDied):
        run_job(lineage, client, slots=1)
    client.before = lambda name: None
    run_job(lineage, client)
    assert set(client.asked_greedily) == {"p0-t0", "p0-t1", "p1-t0"}
    assert len(client.asked) > len(client.asked_greedily)
    greedy = {one.sample_id for one in samples_of(lineage) if one.sampling == {"temperature": 0.0}}
    assert greedy == {"p0-t0", "p0-t1", "p1-t0"}


def test_a_conversation_keeps_what_was_said_until_its_last_turn_is_recorded(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [2], 1)
    work = open_shard(lineage, "p1-s000")
    assert isinstance(work, ShardGeneration)
    with work:
        (conversation,) = work.conversations
        first = conversation.add_reply(reply_to([{"role": "user", "content": "p0.0"}]), {}, "server")
        last = conversation.add_reply(reply_to([{"role": "user", "content": "p0.1"}]), {}, "server")
        work.record([first])
        work.forget_unrecorded()
        assert work.turns_left == 1
        assert conversation.messages()[1] == {"role": "assistant", "content": "answer to p0.0"}
        conversation.samples.append(last)
        work.record([last])
        assert work.is_complete
        assert [(one.content, one.completion_token_ids) for one in conversation.samples] == [("", [])] * 2
        work.finish()
    assert [one.content for one in samples_of(lineage)] == ["answer to p0.0", "answer to p0.1"]


def test_first_replies_that_were_wrong_stay_wrong_in_the_next_life_of_a_server() -> None:
    first = FirstReplies("deepseek_r1", slots=4)
    conversation = Conversation(Prompt("p", ("p.0",) * 20, None, "test"))
    for number in range(20):
        sample = conversation.add_reply(reply_to([{"role": "user", "content": "p.0"}]), {}, "server")
        if number < 15:
            assert first.admit(sample) == []
        else:
            with pytest.raises(QualityError, match="16 first replies carry no reasoning"):
                first.admit(sample)


def test_what_never_came_to_the_disk_is_asked_for_again_in_the_next_life(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [2, 1], 2)
    work = open_shard(lineage, "p2-s000")
    assert isinstance(work, ShardGeneration)
    with work:
        for conversation in work.conversations:
            conversation.add_reply(reply_to([{"role": "user", "content": "p.0"}]), {}, "server")
        work.record(work.conversations[0].samples[:])
        work.forget_unrecorded()
        assert [len(one.samples) for one in work.conversations] == [1, 0]
        assert work.turns_left == 2


def test_a_server_that_fails_at_everything_marks_no_prompt(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 4, 2)
    client = Answers(before=fails_at("p1-t0", "p3-t0"))
    client.is_well = False
    with pytest.raises(ServerStalled, match="2 requests got no reply"):
        run_job(lineage, client)
    assert on_disk(lineage) == {"p0-t0", "p2-t0"}


def test_a_server_that_lives_and_answers_nobody_ends_the_job(tmp_path: Path) -> None:
    def before(name: str) -> None:
        raise Unanswered("timeout", "no reply in 30 s", again=False)

    lineage = make_lineage(tmp_path, [1] * 40, 40)
    client = Answers(before=before)
    with pytest.raises(ServerStalled, match="5 requests in a row"):
        run_job(lineage, client)
    assert len(client.asked) < 12


def test_a_reasoning_parser_that_yields_nothing_stops_the_job_and_records_nothing(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 40, 40)
    client = Answers()
    with pytest.raises(QualityError, match="16 first replies carry no reasoning"):
        run_job(lineage, client, parser="deepseek_r1")
    assert on_disk(lineage) == set()
    assert len(client.asked) < 30


def test_a_reasoning_parser_that_works_for_some_replies_is_trusted(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 40, 40)
    run_job(lineage, Answers({"p9-t0": "thinking"}), parser="deepseek_r1")
    assert len(samples_of(lineage)) == 40


def test_a_server_that_refuses_everything_stops_the_job_and_records_nothing(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 40, 40)
    kinds = {f"p{number}-t0": "refused" for number in range(40)}
    with pytest.raises(QualityError, match="refused all of the first 16 requests: too long"):
        run_job(lineage, Answers(kinds))
    assert on_disk(lineage) == set()


def test_a_journal_cut_inside_a_character_loses_that_reply_only(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 3, 3)
    with pytest.raises(ServerDied):
        run_job(lineage, Answers(before=dies_after(2)))
    (path,) = journals_of(lineage)
    data = path.read_bytes().replace(b"answer to", "näive to".encode())
    path.write_bytes(data[: data.rindex("ä".encode()) + 1])
    client = Answers()
    run_job(lineage, client)
    assert len(client.asked) == 2


def test_a_whole_record_without_its_newline_is_kept(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 3, 3)
    with pytest.raises(ServerDied):
        run_job(lineage, Answers(before=dies_after(2)))
    (path,) = journals_of(lineage)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    client = Answers()
    run_job(lineage, client)
    assert len(client.asked) == 1
    assert len(samples_of(lineage)) == 3


def test_damage_in_the_middle_of_a_journal_is_loud(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 3, 3)
    with pytest.raises(ServerDied):
        run_job(lineage, Answers(before=dies_after(2)))
    (path,) = journals_of(lineage)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:30], lines[2], b""]))
    with pytest.raises(DamagedFile, match="line 2"):
        run_job(lineage, Answers())


def test_replies_to_prompts_of_another_plan_are_never_taken(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 3, 3)
    with pytest.raises(ServerDied):
        run_job(lineage, Answers(before=dies_after(2)))
    (path,) = journals_of(lineage)
    path.write_bytes(path.read_bytes().replace(b'"p0-t0"', b'"x0-t0"').replace(b'"p1-t0"', b'"x1-t0"'))
    with pytest.raises(DamagedFile, match="not in this shard"):
        run_job(lineage, Answers())


def test_a_full_disk_ends_the_job_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3_pipeline.generation.shard_generation import ShardGeneration

    def no_room(self: ShardGeneration, samples: list[Sample]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardGeneration, "record", no_room)
    client = Answers(delays={f"p{number}-t0": 10_000 for number in range(5, 40)})
    with pytest.raises(OSError, match="No space left"):
        run_job(make_lineage(tmp_path, [1] * 40, 40), client)
