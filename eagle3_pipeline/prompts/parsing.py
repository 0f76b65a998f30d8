"""What a user said, out of a row of any of the usual layouts.

    {"prompt": "..."} / {"question": "..."} / {"text": "..."}          one user turn
    {"instruction": "...", "input": "..."}                             Alpaca: one turn, the input below
    {"turns": ["...", "..."]}                                          user turns
    {"messages": [{"role": "user", "content": "..."}, ...]}            OpenAI
    {"conversations": [{"from": "human", "value": "..."}, ...]}        ShareGPT

Rules:
- What the assistant said is left out, the target answers instead, turn by turn.
- Leading system (or developer) messages, and a column `system` or `system_prompt`, are kept.
- One assistant message before the first user turn (a greeting) is dropped. Then user and assistant take
  turns; anything else is `role_order`.
- A row that calls tools, answers for one or offers any (a column `tools` or `functions`) is `tool_call`:
  what tools return is not ours to make up, and without its tools the target would be asked something else.
- A row with images, audio or video in a turn or a column is `multimodal`: no turn is sent without them.
  Columns of media and tools that hold null, "", "[]", [] or [null] hold none.
- Content that is null is no text. Conversations may be JSON text, as in CSV files.
"""

import json
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Reason = Literal[
    "empty",  # no user turn, or one without text
    "malformed",  # no row, no known column, a wrong type, text that is no Unicode
    "role_order",  # two user turns in a row, a system message in the middle
    "unknown_role",
    "multimodal",  # images, audio, video
    "tool_call",  # tools were offered, called or answered
    "template",  # the target's chat template refuses it
    "too_long",
    "duplicate",
    "near_duplicate",
    "near_evaluation",
    "near_validation",  # similar to one of the prompts that judge the draft
]

_CONVERSATION_COLUMNS = ("conversations", "conversation", "messages", "turns")
_COLUMNS = (*_CONVERSATION_COLUMNS, "instruction", "prompt", "question", "text")
_SYSTEM_COLUMNS = ("system", "system_prompt")
_MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
_TOOL_COLUMNS = ("tools", "functions")
# Columns that count beside the one with the prompt.
_COMPANION_COLUMNS = (*_SYSTEM_COLUMNS, *_MEDIA_COLUMNS, *_TOOL_COLUMNS, "input", "kind")

_ROLES = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model"),
    "system": ("system", "developer"),
    "tool": (
        *("tool", "function", "observation", "ipython"),
        *("function_call", "tool_call", "function_response", "tool_response"),
    ),
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
_TEXT_PARTS = ("text", "input_text", "output_text")
_TOOL_PARTS = ("tool_use", "tool_result", "tool_call", "function_call")
_THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")
_MEDIA_PARTS = (*_MEDIA_COLUMNS, "image_url")


class RowRejected(Exception):
    """A row that gives no prompt: the reason that is counted, a detail for people. It never ends the step."""

    def __init__(self, reason: Reason, detail: str) -> None:
        detail = detail.encode(errors="backslashreplace").decode()  # it quotes a row, and goes into a file
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class ParsedPrompt:
    """The user turns and the system message of a row, before any screening."""

    turns: tuple[str, ...]
    system: str | None


def parse(row: Any, column: str | None = None) -> ParsedPrompt:
    """What the user says in a row; raises RowRejected."""
    if not isinstance(row, dict):
        raise RowRejected("malformed", f"expected an object, found {_shown(row)}")
    name = column or _recognise(row)
    _check_companions(row, name)
    if name not in row:
        raise RowRejected("malformed", f"no column {name!r}, there are: {', '.join(row)}")
    value = row[name]
    if name == "instruction" and isinstance(value, str):
        value = "\n\n".join(part for part in (value, _text(row.get("input"), "column input")) if part.strip())
    if name in _CONVERSATION_COLUMNS and isinstance(value, str) and value.strip():
        value = _decode(value, name)
    systems = [_text(row.get(one), f"column {one}") for one in _SYSTEM_COLUMNS if one != name]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        more, turns = _from_messages(value)
        systems += more
    else:
        turns = value if isinstance(value, list) else [value]
    texts = tuple(_user_text(turn, f"user turn {number}") for number, turn in enumerate(turns, start=1))
    if not texts:
        raise RowRejected("empty", "no user turn")
    system = "\n\n".join(dict.fromkeys(text for text in systems if text.strip())) or None
    for text in (*texts, system or ""):
        if not _is_unicode(text):
            raise RowRejected("malformed", "a lone surrogate, which no UTF-8 text can hold")
    return ParsedPrompt(texts, system)


def needed_columns(names: Iterable[str], column: str | None) -> list[str]:
    """Those of a source's columns that prompts can need; all if none has a prompt: people want to know."""
    names = list(names)
    with_prompt = _COLUMNS if column is None else (column,)
    if not any(name in with_prompt for name in names):
        return names
    return [name for name in names if name in with_prompt or name in _COMPANION_COLUMNS]


def media_columns(names: Iterable[str], column: str | None) -> list[str]:
    """Columns with media beside the prompt. A row is only asked whether it has any, see `is_some`."""
    return [name for name in names if name in _MEDIA_COLUMNS and name != column]


def is_some(value: Any) -> bool:
    """Whether there are tools or media; many datasets keep them as JSON text, "[]" where there are none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = value.strip()
    return any(item is not None for item in value) if isinstance(value, list) else bool(value)


def _recognise(row: dict[str, Any]) -> str:
    """The first known column with something in it."""
    present = [name for name in _COLUMNS if name in row]
    if not present:
        raise RowRejected(
            "malformed", f"none of the columns {', '.join(_COLUMNS)}, there are: {', '.join(row)}"
        )
    return next((name for name in present if row[name]), present[0])


def _check_companions(row: dict[str, Any], column: str) -> None:
    """Refuse a row whose other columns hold what its prompt speaks of or works with."""
    for name in media_columns(row, column):
        if is_some(row[name]):
            raise RowRejected("multimodal", f"column {name}")
    for name in _TOOL_COLUMNS:
        if name != column and is_some(row.get(name)):
            raise RowRejected("tool_call", f"tools in column {name}")


def _from_messages(messages: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """System texts and contents of the user turns, after a look at the roles; raises RowRejected."""
    systems: list[str] = []
    turns: list[Any] = []
    last = "start"
    for message in messages:
        role, content = _role_and_content(message)
        if role == "system" and last == "start":
            systems.append(_text(content, "system message"))
        elif role == "user" and last in ("start", "assistant", "greeting"):
            turns.append(content)
            last = "user"
        elif role == "assistant" and last in ("start", "user"):
            # An image there is what the next user turn may speak of; thoughts are never sent again.
            _text(_without_thoughts(content), "assistant turn")
            last = "assistant" if turns else "greeting"
        else:
            raise RowRejected("role_order", f"{role} after {last}")
    return systems, turns


def _role_and_content(message: Any) -> tuple[str, Any]:
    if not isinstance(message, dict):
        raise RowRejected("malformed", f"expected a message, found {_shown(message)}")
    name = message.get("role") or message.get("from")
    role = _ROLE_OF.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise RowRejected("unknown_role", f"{_shown(name)}")
    if role == "tool" or is_some(message.get("tool_calls")) or is_some(message.get("function_call")):
        raise RowRejected("tool_call", f"in a message of the {role}")
    content = message.get("content")
    return role, message.get("value") if content is None else content


def _user_text(content: Any, what: str) -> str:
    text = _text(content, what)
    if not text.strip():
        raise RowRejected("empty", what)
    return text


def _text(content: Any, what: str) -> str:
    """The text of a content: a string, nothing, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowRejected("malformed", f"{what}: expected text, found {_shown(content)}")
    parts = []
    for part in content:
        kind = _kind(part) if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind in _TOOL_PARTS:
            raise RowRejected("tool_call", f"{what}: a part of type {kind}")
        if kind not in _TEXT_PARTS:
            raise RowRejected("multimodal", f"{what}: a part of type {_shown(kind)}")
        if not isinstance(text, str):
            raise RowRejected("malformed", f"{what}: expected a part with text, found {_shown(part)}")
        parts.append(text)
    return "\n".join(parts)


def _kind(part: dict[str, Any]) -> Any:
    return part.get("type") or next((name for name in _MEDIA_PARTS if part.get(name)), "text")


def _without_thoughts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [part for part in content if not (isinstance(part, dict) and _kind(part) in _THOUGHT_PARTS)]


def _decode(text: str, column: str) -> list[Any]:
    """A conversation that is stored as JSON text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise RowRejected("malformed", f"column {column}: expected a list of turns, found {_shown(text)}")
    return value


_shown = reprlib.repr  # a few words of whatever it is, however long or deep


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
