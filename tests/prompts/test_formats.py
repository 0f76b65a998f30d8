"""One conversation in any layout and any file format is the same prompt; garbage is counted, never raised."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.prompts.screening import Rejection, Screening
from eagle3_pipeline.prompts.sources import read_file

# What people write: quotes, newlines, separators, other scripts. No surrogates, no NUL (CSV has none).
_TEXT = st.text(
    st.sampled_from("aB7 ,;:\"'\n\t|\\{}[]<>&%äß中🙂\u2028\u00a0"), min_size=1, max_size=30
).filter(str.strip)
_SYSTEM = st.none() | _TEXT

Row = dict[str, Any]
Said = tuple[list[str], str | None]


def _replies(turns: list[str]) -> list[str | None]:
    return [None if number % 2 else f"reply {number}" for number in range(len(turns))]


def _openai(turns: list[str], system: str | None) -> Row:
    messages = [{"role": "system", "content": system}] if system is not None else []
    for turn, reply in zip(turns, _replies(turns), strict=True):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": reply}]
    return {"messages": messages}


def _share_gpt(turns: list[str], system: str | None) -> Row:
    said = []
    for turn, reply in zip(turns, _replies(turns), strict=True):
        said += [{"from": "human", "value": turn}, {"from": "gpt", "value": reply}]
    return {"conversations": said, "system": system}


def _turns(turns: list[str], system: str | None) -> Row:
    return {"turns": turns, "system_prompt": system}


def _plain(column: str) -> Callable[[list[str], str | None], Row]:
    return lambda turns, system: {column: turns[0], "answer": "never sent", "system": system}


def _write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_json(path: Path, rows: list[Row]) -> None:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")


def _write_parquet(path: Path, rows: list[Row]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _write_csv(path: Path, rows: list[Row]) -> None:
    """Lists go in as JSON text, nothing as an empty cell."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {name: json.dumps(cell) if isinstance(cell, list) else cell for name, cell in row.items()}
            )


_WRITERS = {"jsonl": _write_jsonl, "json": _write_json, "parquet": _write_parquet, "csv": _write_csv}


def _prompts(path: Path) -> list[Prompt | Rejection]:
    screening = Screening(tokens_of=lambda _: 1, max_prompt_tokens=1, near_duplicate_similarity=1.0)
    return [screening.judge(row) for row in read_file(path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@pytest.mark.parametrize("suffix", _WRITERS)
@settings(max_examples=40, deadline=None)
@given(turns=st.lists(_TEXT, min_size=1, max_size=4), system=_SYSTEM)
def test_a_conversation_has_the_same_id_in_every_layout_and_format(
    folder: Path, suffix: str, turns: list[str], system: str | None
) -> None:
    system = system and system.strip()  # CSV readers agree on cells, not on their outer white space
    layouts = [_openai, _share_gpt, _turns]
    if len(turns) == 1:
        layouts += [_plain(name) for name in ("prompt", "question", "instruction", "text")]
    wanted = Prompt.create(tuple(turns), system=system, source="").prompt_id
    for number, layout in enumerate(layouts):
        path = folder / f"{number}.{suffix}"
        _WRITERS[suffix](path, [layout(turns, system)])
        (made,) = _prompts(path)
        assert isinstance(made, Prompt)
        assert made.prompt_id == wanted


@pytest.mark.parametrize("suffix", _WRITERS)
@settings(max_examples=20, deadline=None)
@given(instruction=_TEXT, more=_TEXT)
def test_an_instruction_and_its_input_are_one_turn_in_every_format(
    folder: Path, suffix: str, instruction: str, more: str
) -> None:
    path = folder / f"alpaca.{suffix}"
    _WRITERS[suffix](path, [{"instruction": instruction, "input": more, "output": "never sent"}])
    (made,) = _prompts(path)
    assert isinstance(made, Prompt)
    assert made.turns == (f"{instruction}\n\n{more}",)


_KEYS = st.sampled_from(
    [
        *("messages", "conversations", "turns", "prompt", "instruction", "input", "system", "tools", "image"),
        *("role", "from", "content", "value", "type", "text", "tool_calls", "user", "assistant", "kind"),
    ]
)
_WILD = st.text(st.characters(), max_size=4)  # lone surrogates too: JSON text can spell them
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _WILD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS | _WILD, inner, max_size=3),
    max_leaves=8,
)
_LINES = st.lists(_JSON.map(json.dumps) | st.text(st.characters(exclude_characters="\n\r")), max_size=12)


@settings(max_examples=150, deadline=None)
@given(lines=_LINES)
@example(lines=['{"\\ud800": 1}', '{"prompt": [[["\\ud800"]]]}', '{"messages": [{"role": "\\udfff"}]}'])
@example(
    lines=['{"prompt": {"a": ' + "[" * depth + "]" * depth + "}}" for depth in (200, 900, 960, 975, 985)]
)
def test_rows_in_are_kept_plus_rejected_whatever_the_lines_hold(folder: Path, lines: list[str]) -> None:
    path = folder / "garbage.jsonl"
    path.write_bytes(b"".join(line.encode("utf-8", "surrogatepass") + b"\n" for line in lines))
    rows = read_file(path)
    verdicts = _prompts(path)
    assert len(rows) == sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    kept = [verdict for verdict in verdicts if isinstance(verdict, Prompt)]
    rejected = [verdict for verdict in verdicts if isinstance(verdict, Rejection)]
    assert len(rows) == len(kept) + len(rejected)
    for verdict in verdicts:
        json.dumps(verdict.to_json(), ensure_ascii=False).encode()


def test_content_of_another_type_in_each_row_is_judged_row_by_row(folder: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    contents: list[Any] = ["Hi", [{"type": "text", "text": "Ho"}], [image], [], None]
    path = folder / "mixed.json"
    path.write_text(json.dumps([{"messages": [{"role": "user", "content": one}]} for one in contents]))
    verdicts = _prompts(path)
    said = [verdict.turns[0] if isinstance(verdict, Prompt) else verdict.reason for verdict in verdicts]
    assert said == ["Hi", "Ho", "multimodal", "empty", "empty"]


def test_cells_that_are_missing_or_too_many_cost_no_other_row(folder: Path) -> None:
    path = folder / "ragged.csv"
    path.write_text("prompt,system\nOne,S\nTwo\nThree,S,more\n,S\nFive,S\n")
    verdicts = _prompts(path)
    said = [verdict.turns[0] if isinstance(verdict, Prompt) else verdict.reason for verdict in verdicts]
    assert said == ["One", "Two", "malformed", "empty", "Five"]
