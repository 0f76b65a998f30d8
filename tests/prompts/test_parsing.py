"""What a user said, out of rows of every layout, and a reason for each row that gives nothing."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.prompts.parsing import ParsedPrompt, RowRejected, parse


def _messages(*turns: tuple[str, Any], **row: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **row}


def _share_gpt(*turns: tuple[str, Any], **row: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns], **row}


@pytest.mark.parametrize(
    ("row", "turns", "system"),
    [
        ({"prompt": "Hi"}, ("Hi",), None),
        ({"question": "Hi?", "answer": "Yes"}, ("Hi?",), None),
        ({"text": "  def f():\n"}, ("  def f():\n",), None),
        ({"instruction": "Sum up:", "input": "A long text."}, ("Sum up:\n\nA long text.",), None),
        ({"instruction": "Sing.", "input": ""}, ("Sing.",), None),
        ({"instruction": "Sing.", "input": None}, ("Sing.",), None),
        ({"turns": ["One", "Two"]}, ("One", "Two"), None),
        ({"prompt": ["One", "Two"]}, ("One", "Two"), None),
        ({"prompt": [{"role": "user", "content": "Hi"}]}, ("Hi",), None),
        ({"prompt": "Hi", "system": "Be kind."}, ("Hi",), "Be kind."),
        ({"prompt": "Hi", "system": " "}, ("Hi",), None),
        ({"conversations": None, "prompt": "Hi"}, ("Hi",), None),
        (_messages(("system", "Be kind."), ("user", "Hi")), ("Hi",), "Be kind."),
        (_messages(("User", "Hi"), ("assistant", None), ("user", "Bye")), ("Hi", "Bye"), None),
        (
            _share_gpt(
                ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), ("human", "e"), ("gpt", "f")
            ),
            ("a", "c", "e"),
            None,
        ),
        (_share_gpt(("gpt", "Welcome!"), ("human", "Hi")), ("Hi",), None),
        (_share_gpt(("system", "S1"), ("human", "Hi"), system="S0"), ("Hi",), "S0\n\nS1"),
        (_share_gpt(("system", "S"), ("human", "Hi"), system="S"), ("Hi",), "S"),
        (
            _share_gpt(
                ("user", "a"), ("chatgpt", "."), ("user", "b"), ("bing", "."), ("user", "c"), ("bard", ".")
            ),
            ("a", "b", "c"),
            None,
        ),
        (_messages(("user", [{"type": "text", "text": "One"}, "two"])), ("One\ntwo",), None),
        (_messages(("user", [{"type": "text", "text": "One", "image_url": None}])), ("One",), None),
        ({"prompt": "Draw", "image": None, "images": []}, ("Draw",), None),
        ({"prompt": "Draw", "image": "[]", "images": [None], "audio": " ", "tools": [None]}, ("Draw",), None),
        *(
            (_messages(("user", "Hi"), ("assistant", [{"type": kind, kind: "Hm."}])), ("Hi",), None)
            for kind in ("thinking", "reasoning", "redacted_thinking")
        ),
        ({"conversation": [{"role": "user", "content": "Hi"}]}, ("Hi",), None),
        ({"messages": "", "prompt": "Hi"}, ("Hi",), None),
        ({"turns": '["One", "Two"]'}, ("One", "Two"), None),
        ({"messages": '[{"role": "user", "content": "Hi"}]'}, ("Hi",), None),
        ({"question": "Hi?", "system_prompt": "Be kind."}, ("Hi?",), "Be kind."),
        ({"prompt": "Hi", "system": [{"type": "text", "text": "Be kind."}]}, ("Hi",), "Be kind."),
        (_messages(("developer", "Be kind."), ("user", "Hi"), ("model", "Yes?")), ("Hi",), "Be kind."),
        (_messages(("user", "Hi"), ("assistant", [{"type": "output_text", "text": "."}])), ("Hi",), None),
        (_messages(("user", [{"type": None, "text": "One"}])), ("One",), None),
        (_messages(("user", "Hi"), tools="[]", functions=None), ("Hi",), None),
        (_messages(("user", "Hi"), tools=" ", functions="null"), ("Hi",), None),
    ],
)
def test_every_turn_and_the_system_message_are_kept(
    row: dict[str, Any], turns: tuple[str, ...], system: str | None
) -> None:
    assert parse(row) == ParsedPrompt(turns, system)


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ("half a line", "malformed", "expected an object, found 'half a line'"),
        (None, "malformed", "expected an object, found None"),
        ({"title": "x"}, "malformed", "none of the columns conversations, .* there are: title"),
        ({"prompt": 3}, "malformed", "user turn 1: expected text, found 3"),
        ({"prompt": {"a": 1}}, "malformed", "user turn 1: expected text"),
        ({"prompt": "\ud800"}, "malformed", "a lone surrogate"),
        (
            {"messages": ["Hi", {"role": "user", "content": "x"}]},
            "malformed",
            "expected a message, found 'Hi'",
        ),
        (_messages(("user", [{"type": "text"}])), "malformed", "user turn 1: expected a part with text"),
        ({"messages": "Hi"}, "malformed", "column messages: expected a list of turns, found 'Hi'"),
        ({"messages": '{"role": "user"}'}, "malformed", "column messages: expected a list of turns"),
        ({"conversations": "[" * 100_000}, "malformed", "column conversations: expected a list of turns"),
        ({"prompt": "Hi", "system": 3}, "malformed", "column system: expected text, found 3"),
        ({"instruction": "Add", "input": {"a": 1}}, "malformed", "column input: expected text"),
        ({"prompt": None}, "empty", "user turn 1"),
        ({"messages": ""}, "empty", "user turn 1"),
        ({"prompt": " \n"}, "empty", "user turn 1"),
        ({"turns": []}, "empty", "no user turn"),
        ({"turns": ["One", ""]}, "empty", "user turn 2"),
        (_messages(("user", "Hi"), ("assistant", "."), ("user", None)), "empty", "user turn 2"),
        (_messages(("system", "S")), "empty", "no user turn"),
        (_messages(("user", "a"), ("user", "b"), ("assistant", "c")), "role_order", "user after user"),
        (_messages(("user", "a"), ("system", "b")), "role_order", "system after user"),
        (
            _messages(("assistant", "a"), ("assistant", "b"), ("user", "c")),
            "role_order",
            "assistant after greeting",
        ),
        (_messages(("narrator", "a")), "unknown_role", "'narrator'"),
        (_messages((None, "a")), "unknown_role", "None"),  # type: ignore[arg-type]
        (
            _messages(("user", [{"type": "image_url", "image_url": {}}])),
            "multimodal",
            "a part of type 'image_url'",
        ),
        (_messages(("user", "a"), ("assistant", [{"type": "image"}])), "multimodal", "assistant turn"),
        *(
            (
                _messages(("user", [{"text": "a"}, {"text": None, name: "a.png"}])),
                "multimodal",
                f"type '{name}'",
            )
            for name in ("image", "image_url")
        ),
        (_messages(("user", [{"type": "thinking", "thinking": "Hm."}])), "multimodal", "type 'thinking'"),
        ({"prompt": "Look!", "images": '["a.png"]'}, "multimodal", "column images"),
        ({"prompt": "<image> What is it?", "image": {"bytes": b"x"}}, "multimodal", "column image"),
        (_messages(("user", "a"), ("tool", "42")), "tool_call", "in a message of the tool"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}
                ]
            },
            "tool_call",
            "in a message of the assistant",
        ),
        *(
            (
                _messages(("user", "a"), ("assistant", "b"), (role, "c")),
                "tool_call",
                "in a message of the tool",
            )
            for role in ("function", "observation", "ipython", "function_call", "tool_call", "tool_response")
        ),
        (_messages(("user", "a"), tools=[{"name": "clock"}]), "tool_call", "tools in column tools"),
        (_messages(("user", "a"), tools='[{"name": "clock"}]'), "tool_call", "tools in column tools"),
        ({"prompt": "a", "functions": "def clock(): ..."}, "tool_call", "tools in column functions"),
        (
            _messages(("user", [{"type": "tool_result", "content": "4"}])),
            "tool_call",
            "a part of type tool_result",
        ),
        (
            _messages(("user", "a"), ("assistant", [{"type": "tool_use"}])),
            "tool_call",
            "a part of type tool_use",
        ),
    ],
)
def test_a_row_without_a_usable_prompt_has_a_reason(row: Any, reason: str, detail: str) -> None:
    with pytest.raises(RowRejected, match=f"^{reason}: .*{detail}") as caught:
        parse(row)
    assert caught.value.reason == reason


def test_a_named_column_is_taken_even_if_another_would_be_recognised() -> None:
    row = {"prompt": "no", "ask": "yes", "image": "yes too"}
    assert parse({**row, "image": None}, "ask").turns == ("yes",)
    assert parse(row, "image").turns == ("yes too",)
    with pytest.raises(RowRejected, match="malformed: no column 'asks', there are: prompt, ask, image"):
        parse({**row, "image": None}, "asks")


def test_empty_lists_of_tool_calls_as_parquet_files_have_them_call_nothing() -> None:
    message = {"content": "Hi", "tool_calls": [], "function_call": None}
    assert parse({"messages": [{"role": "user", **message}], "tools": []}).turns == ("Hi",)


_keys = st.sampled_from(["role", "from", "content", "value", "type", "text", "tool_calls", "user", "system"])
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab <\n", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=8,
)
_columns = st.sampled_from(
    ["prompt", "turns", "messages", "conversations", "instruction", "input", "image", "system", "tools"]
)


@settings(deadline=None)
@given(row=st.dictionaries(_columns, _values, max_size=4) | _values)
def test_any_row_gives_a_prompt_with_text_or_a_reason_and_never_the_text_none(row: Any) -> None:
    try:
        parsed = parse(row)
    except RowRejected:
        return
    assert all(turn.strip() for turn in parsed.turns)
    assert parsed.turns
    assert "None" not in (*parsed.turns, parsed.system or "")
