"""Screening: every row in is a prompt or a rejection, and of two similar ones the earlier stays."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.prompts.chat_length import ChatLength
from eagle3_pipeline.prompts.parsing import ParsedPrompt, RowRejected, parse
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.prompts.screening import Rejection, Screening
from eagle3_pipeline.prompts.sources import Row
from tests.recipes import distinct_prompts

TWELVE = "one two three four five six seven eight nine ten eleven twelve"


def _words(parsed: ParsedPrompt) -> int:
    return sum(len(turn.split()) for turn in parsed.turns)


def _screening(**changes: Any) -> Screening:
    return Screening(
        **{"tokens_of": _words, "max_prompt_tokens": 30, "near_duplicate_similarity": 0.7, **changes}
    )


def _judge(rows: list[Any], **changes: Any) -> list[Prompt | Rejection]:
    screening = _screening(**changes)
    return [screening.judge(Row("a.jsonl", number, row)) for number, row in enumerate(rows, start=1)]


def _kept(verdicts: list[Prompt | Rejection]) -> list[Prompt]:
    return [verdict for verdict in verdicts if isinstance(verdict, Prompt)]


def test_each_rejection_says_where_why_and_what() -> None:
    verdicts = _judge(
        [
            {"prompt": TWELVE},
            {"prompt": TWELVE.upper() + "\n"},
            {"prompt": TWELVE + " thirteen"},
            {"prompt": "word " * 31},
            "no JSON",
            {"prompt": " "},
        ]
    )
    assert [verdict.to_json() for verdict in verdicts[1:] if isinstance(verdict, Rejection)] == [
        {"where": "a.jsonl:2", "reason": "duplicate", "detail": "same as a.jsonl:1"},
        {"where": "a.jsonl:3", "reason": "near_duplicate", "detail": "similarity 0.89 to a.jsonl:1"},
        {"where": "a.jsonl:4", "reason": "too_long", "detail": "31 tokens, prompts.max_prompt_tokens is 30"},
        {"where": "a.jsonl:5", "reason": "malformed", "detail": "expected an object, found 'no JSON'"},
        {"where": "a.jsonl:6", "reason": "empty", "detail": "user turn 1"},
    ]


def test_prompts_near_an_evaluation_prompt_are_kept_out_by_any_of_their_turns() -> None:
    held_out = [Prompt.create((TWELVE, "a second turn that is never sent"), system=None, source="held")]
    verdicts = _judge(
        [
            {"prompt": TWELVE.title()},
            {"turns": ["Something else entirely", TWELVE + " thirteen"]},
            {"prompt": "a second turn that is never sent"},
        ],
        held_out=held_out,
    )
    assert [getattr(verdict, "detail", None) for verdict in verdicts] == [
        "same as one of held",
        "similarity 0.89 to one of held",
        None,
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": f"Below is a question, answer it with care and at length. {TWELVE} Thank you a lot!"},
        {"turns": ["Tell me: " + TWELVE.partition(" ten")[0], TWELVE.partition("four ")[2]]},
        {"prompt": "Do as you are told.", "system": f"Always think of {TWELVE} before any reply."},
    ],
)
def test_a_held_out_prompt_within_a_longer_training_prompt_is_found(row: dict[str, Any]) -> None:
    held_out = [Prompt.create((TWELVE,), system=None, source="held")]
    for bound in (0.7, 1.0):
        (verdict,) = _judge([row], held_out=held_out, near_duplicate_similarity=bound)
        assert isinstance(verdict, Rejection)
        assert verdict.reason == "near_evaluation"
        assert verdict.detail.endswith("% of one of held")


@pytest.mark.parametrize(
    ("row", "share"),
    [
        ({"prompt": TWELVE}, "100%"),
        ({"turns": ["Hello!", TWELVE + " thirteen"]}, "89%"),
        ({"prompt": TWELVE.removesuffix(" twelve")}, None),  # a turn of phrase
        ({"prompt": TWELVE + " and as many other words again as there are in here"}, None),
    ],
)
def test_a_training_prompt_within_a_longer_held_out_one_is_found(
    row: dict[str, Any], share: str | None
) -> None:
    text = f"Below is a question, answer it with care and at length. {TWELVE} Thank you a lot!"
    for bound in (0.7, 1.0):
        (verdict,) = _judge(
            [row],
            held_out=[Prompt.create((text,), system=None, source="held")],
            near_duplicate_similarity=bound,
        )
        detail = f"{share} of a turn are in one of held" if share else None
        assert getattr(verdict, "detail", None) == detail


def test_a_turn_of_phrase_is_no_held_out_prompt_within_a_longer_one() -> None:
    held_out = [Prompt.create((TWELVE.removesuffix(" twelve"),), system=None, source="held")]
    (verdict,) = _judge([{"prompt": f"Go on until you are at {TWELVE} or higher"}], held_out=held_out)
    assert isinstance(verdict, Prompt)


def test_prompts_near_any_turn_of_one_that_judges_are_kept_out_however_many_repeats_are_allowed() -> None:
    verdicts = _judge(
        [
            {"turns": ["Name a bird.", TWELVE, "Go on."]},
            {"prompt": TWELVE + " thirteen"},
            {"prompt": "Name a bird"},
            {"prompt": "NAME a bird."},
            {"prompt": "Go on."},
            {"turns": ["Hello!", f"Below is a question, answer it with care. {TWELVE} Thank you!"]},
            {"turns": ["Name a bird.", TWELVE, "Go on."]},
            {"prompt": "What is tea?"},
        ],
        near_duplicate_similarity=1.0,
        validation=1,
    )
    found = [(one.reason, one.detail) if isinstance(one, Rejection) else None for one in verdicts]
    assert found == [
        None,
        ("near_validation", "similarity 0.89 to a.jsonl:1"),
        ("near_validation", "similarity 1.00 to a.jsonl:1"),
        ("near_validation", "same as a.jsonl:1"),
        None,
        ("near_validation", "holds 100% of a.jsonl:1"),
        ("duplicate", "same as a.jsonl:1"),
        None,
    ]


def test_prompts_that_judge_may_be_like_each_other() -> None:
    verdicts = _judge(
        [{"prompt": TWELVE}, {"prompt": TWELVE + " thirteen"}, {"prompt": TWELVE + " fourteen"}],
        near_duplicate_similarity=0.95,
        validation=2,
    )
    assert [type(verdict) for verdict in verdicts] == [Prompt, Prompt, Rejection]


def test_a_duplicate_is_dropped_even_if_near_duplicates_are_allowed() -> None:
    verdicts = _judge(
        [{"prompt": TWELVE}, {"prompt": TWELVE + " thirteen"}, {"prompt": TWELVE}],
        near_duplicate_similarity=1.0,
    )
    assert [type(verdict) for verdict in verdicts] == [Prompt, Prompt, Rejection]


def test_a_long_system_message_makes_no_two_prompts_similar() -> None:
    verdicts = _judge([{"prompt": text, "system": TWELVE * 9} for text in ("Name a bird.", "What is tea?")])
    assert [prompt.system for prompt in _kept(verdicts)] == [TWELVE * 9] * 2


def test_an_id_follows_from_what_is_said_and_not_from_where_it_stood() -> None:
    one, same, other, with_system = (
        Prompt.create(turns, system=system, source=source)
        for turns, system, source in [
            (("a", "b"), None, "x.jsonl"),
            (("a", "b"), None, "y.jsonl"),
            (("a b",), None, "x.jsonl"),
            (("a", "b"), "s", "x.jsonl"),
        ]
    )
    assert one.prompt_id == same.prompt_id == "add5bc59522849d6"
    assert len({one.prompt_id, other.prompt_id, with_system.prompt_id}) == 3
    assert Prompt.from_json(with_system.to_json()) == with_system


_POOL = [
    *({"prompt": text} for text in distinct_prompts(6, seed=3)),
    {"prompt": TWELVE},
    {"prompt": TWELVE + " thirteen"},
    {"prompt": "word " * 31},
    {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    None,
]


@settings(deadline=None)
@given(rows=st.lists(st.sampled_from(_POOL), max_size=20), data=st.data())
def test_rows_in_are_kept_plus_rejected_and_fewer_rows_give_a_prefix(
    rows: list[Any], data: st.DataObject
) -> None:
    validation = data.draw(st.integers(0, 3))
    verdicts = _judge(rows, validation=validation)
    assert all(isinstance(verdict, Prompt | Rejection) for verdict in verdicts)
    cut = data.draw(st.integers(0, len(rows)))
    assert _judge(rows[:cut], validation=validation) == verdicts[:cut]
    texts = [prompt.turns for prompt in _kept(verdicts)]
    assert len(set(texts)) == len(texts)


def test_tokens_are_counted_through_the_chat_template(tiny_llama: Path) -> None:
    length = ChatLength(tiny_llama)
    one = length(ParsedPrompt(("Please write a short letter",), None))
    assert one == len(length._tokenizer("Please write a short letter")["input_ids"]) + 4
    assert length(ParsedPrompt(("Please write a short letter",), "A good plan")) > one
    assert length(ParsedPrompt(("Please write a short letter", "How many eggs?"), None)) > one


def test_what_is_rendered_has_the_system_message_and_never_the_text_none(tiny_llama: Path) -> None:
    length = ChatLength(tiny_llama)
    rows: list[dict[str, Any]] = [
        {"prompt": "Why?", "system": "Be kind."},
        {"messages": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Why?"}]},
        {
            "messages": [
                {"role": "system", "content": None},
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": None, "tool_calls": None},
                {"role": "user", "content": "And then?"},
            ],
            "system": None,
        },
    ]
    template = length._tokenizer.apply_chat_template
    rendered: list[str] = []

    def render(messages: list[dict[str, str]], **_: Any) -> list[int]:
        rendered.append(template(messages, tokenize=False))
        return [0]

    length._tokenizer.apply_chat_template = render
    for row in rows:
        length(parse(row))
    assert ["Be kind." in text for text in rendered] == [True, True, False]
    assert all("Why?" in text and "None" not in text for text in rendered)


def test_a_template_that_refuses_a_row_is_a_reason_and_none_at_all_is_an_error(tiny_llama: Path) -> None:
    length = ChatLength(tiny_llama)
    length._tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    assert length(ParsedPrompt(("Hi",), None)) > 0
    with pytest.raises(RowRejected, match="template: System role not supported"):
        length(ParsedPrompt(("Hi",), "Be kind."))


def test_a_template_that_fails_at_one_row_is_a_reason_and_at_the_first_an_error(tiny_llama: Path) -> None:
    length = ChatLength(tiny_llama)
    refusal = "{% if messages[0].role == 'system' %}{{ 1 + messages[0].content }}{% endif %}"
    length._tokenizer.chat_template = refusal + "{{ messages[0].content }}"
    with pytest.raises(BadInput, match=r"chat template of .* fails at the first prompt: TypeError: "):
        length(ParsedPrompt(("Hi",), "Be kind."))
    assert length(ParsedPrompt(("Hi",), None)) > 0
    with pytest.raises(RowRejected, match="template: TypeError: "):
        length(ParsedPrompt(("Hi",), "Be kind."))
