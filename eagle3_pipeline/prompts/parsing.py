"""What a user said, out of a row of any of the usual layouts.

    {"prompt": "..."} / {"question": "..."} / {"text": "..."}          one user turn
    {"instruction": "...", "input": "..."}                             Alpaca: one turn, the input below
    {"turns": ["...", "..."]}                                          user turns
    {"messages": [{"role": "user", "content": "..."}, ...]}            OpenAI
    {"conversations": [{"from": "human", "value": "..."}, ...]}        ShareGPT

Rules: what the assistant said is left out, the target answers instead. Leading system messages, and
a column `system`, are kept. One assistant message before the first user turn (a greeting) is
dropped. Then user and assistant take turns; anything else is rejected as `role_order`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Reason = Literal[
    "empty",  # no user turn, or one without text
    "malformed",  # no row, no known column, a wrong type, text that is no Unicode
    "role_order",  # two user turns in a row, a system message in the middle
    "unknown_role",
    "multimodal",  # images, audio, video
    "tool_call",  # tools were called or answered: their results are not ours to make up
    "template",  # the target's chat template refuses it
    "too_long",
    "duplicate",
    "near_duplicate",
    "near_evaluation",
]

_COLUMNS = ("conversations", "messages", "turns", "instruction", "prompt", "question", "text")
_MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
_ROLES = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard"),
    "system": ("system",),
    "tool": ("tool",),
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}


class RowRejected(Exception):
    """A row that gives no prompt: the reason that is counted, a detail for people. It never ends the step."""

    def __init__(self, reason: Reason, detail: str) -> None:
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
        raise RowRejected("malformed", f"expected an object, found {row!r:.80}")
    for name in _MEDIA_COLUMNS:
        if name != column and row.get(name):
            raise RowRejected("multimodal", f"column {name}")
    name = column or _recognise(row)
    if name not in row:
        raise RowRejected("malformed", f"no column {name!r}, there are: {', '.join(row)}")
    value = row[name]
    if name == "instruction" and isinstance(value, str) and isinstance(row.get("input"), str):
        value = "\n\n".join(part for part in (value, row["input"]) if part.strip())
    systems = [row["system"]] if isinstance(row.get("system"), str) and name != "system" else []
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


def _recognise(row: dict[str, Any]) -> str:
    present = [name for name in _COLUMNS if name in row]
    if not present:
        raise RowRejected(
            "malformed", f"none of the columns {', '.join(_COLUMNS)}, there are: {', '.join(row)}"
        )
    return next((name for name in present if row[name] is not None), present[0])


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
            _text(content, "assistant turn")  # an image there is what the next user turn may speak of
            last = "assistant" if turns else "greeting"
        else:
            raise RowRejected("role_order", f"{role} after {last}")
    return systems, turns


def _role_and_content(message: Any) -> tuple[str, Any]:
    if not isinstance(message, dict):
        raise RowRejected("malformed", f"expected a message, found {message!r:.80}")
    name = message.get("role") or message.get("from")
    role = _ROLE_OF.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise RowRejected("unknown_role", f"{name!r:.40}")
    if role == "tool" or message.get("tool_calls") or message.get("function_call"):
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
        raise RowRejected("malformed", f"{what}: expected text, found {content!r:.80}")
    parts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in ("text", "input_text"):
            raise RowRejected("multimodal", f"{what}: a part of type {kind!r:.40}")
        if not isinstance(text, str):
            raise RowRejected("malformed", f"{what}: expected a part with text, found {part!r:.80}")
        parts.append(text)
    return "\n".join(parts)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
