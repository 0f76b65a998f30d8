import json
import time
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eagle3_pipeline.samples.screening import loop_period, screen

END = 2
TEXT = list(range(100, 160))


def table(rows: int, row_tokens: int = 9) -> list[int]:
    """Rows that are alike but for one cell, as a price list's."""
    return [token for row in range(rows) for token in [*range(10, 10 + row_tokens - 1), 1000 + row]]


@pytest.mark.parametrize(
    ("finish_reason", "content", "reasoning", "verdict"),
    [
        ("stop", "fine", "", "good"),
        ("stop", "fine", "hm", "good"),
        ("length", "cut of", "", "truncated"),
        ("length", "", "all in the thoughts", "truncated"),
        ("length", " \n", "", "empty"),
        ("stop", "", "", "empty"),
        ("stop", " \n ", "only thoughts", "empty"),
        ("repetition", "items items", "", "degenerate"),
    ],
)
def test_a_reply_without_a_loop_is_judged_by_its_end_and_its_text(
    finish_reason: str, content: str, reasoning: str, verdict: str
) -> None:
    assert screen([*TEXT, END], finish_reason, content, reasoning) == verdict


@given(
    start=st.lists(st.integers(0, 50), max_size=80),
    block=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    copies=st.integers(3, 8),
    rest=st.integers(0, 39),
)
def test_a_block_repeated_to_the_end_is_degenerate_wherever_the_limit_cuts_it(
    start: list[int], block: list[int], copies: int, rest: int
) -> None:
    loop = block * copies + block[: rest % len(block)]
    assume(len(loop) >= 32 + len(block))
    assert screen(start + loop, "length", "text", "") == "degenerate"
    assert screen([*start, *loop, END], "stop", "text", "") == "degenerate"


@given(rows=st.integers(1, 200), row_tokens=st.integers(2, 30))
def test_a_table_whose_rows_differ_in_a_cell_is_kept_however_long_it_is(rows: int, row_tokens: int) -> None:
    assert loop_period(table(rows, row_tokens)) is None


@pytest.mark.parametrize(
    "ids",
    [
        TEXT + [7] * 20,  # a ruler
        TEXT * 2,  # a text said twice, as a refrain
        [7] * 200 + TEXT,  # a board of zeros with an explanation after it
        [],
        [END],
    ],
    ids=["short run", "two copies", "loop that ended", "nothing", "end only"],
)
def test_what_repeats_a_little_or_goes_on_after_it_is_kept(ids: list[int]) -> None:
    assert loop_period(ids) is None


def test_the_period_is_that_of_the_shortest_block() -> None:
    assert loop_period(TEXT + [8, 9] * 30) == 2
    assert loop_period(TEXT + [9] * 90) == 1


def period_by_the_book(ids: list[int]) -> int | None:
    """The definition, word for word: the last max(2 p, 32) tokens each equal the one p before."""
    for period in range(1, len(ids) // 3 + 1):
        tokens = max(2 * period, 32)
        pairs = [(at, at - period) for at in range(len(ids) - tokens, len(ids))]
        if pairs[0][1] >= 0 and all(ids[at] == ids[before] for at, before in pairs):
            return period
    return None


@given(
    start=st.lists(st.integers(0, 2), max_size=40),
    block=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    copies=st.integers(1, 12),
    end=st.lists(st.integers(0, 2), max_size=2),
)
def test_the_period_is_the_one_of_the_definition(
    start: list[int], block: list[int], copies: int, end: list[int]
) -> None:
    ids = start + block * copies + end
    assert loop_period(ids) == period_by_the_book(ids)


# A byte stands for a token: the loops of real text and code are at least as close as with a tokenizer.
@pytest.mark.parametrize(
    "text",
    [
        Path(__file__).read_text(),
        "| | a | b |\n|---|---|---|\n" + "".join(f"| {n} | 0.00 | 0.00 |\n" for n in range(300)),
        json.dumps([{"id": n, "name": "", "tags": [], "ok": True} for n in range(200)], indent=2),
        "<ul>\n" + "".join(f"  <li>item {n}</li>\n" for n in range(100)) + "</ul>\n",
        "def zeros():\n    return [\n" + "        [0, 0, 0, 0, 0, 0, 0, 0],\n" * 8 + "    ]\n",
        "```\n" + "+---+---+---+\n|   |   |   |\n" * 8 + "```\n",
        "if a:\n" + "".join("    " * n + "if b:\n" for n in range(1, 12)) + "    " * 12 + "pass",
    ],
    ids=["code", "table", "JSON", "HTML", "matrix", "board", "indents"],
)
def test_tables_and_code_are_kept(text: str) -> None:
    assert screen([*text.encode(), END], "stop", text, "") == "good"


@pytest.mark.parametrize("text", ["items " * 100, "Let me check that again.\n" * 40], ids=["word", "line"])
def test_a_word_or_a_line_over_and_over_is_flagged_in_the_answer_and_in_the_thoughts(text: str) -> None:
    ids = list(b"First, a plan. " + text.encode())
    assert screen(ids, "length", text, "") == "degenerate"
    assert screen(ids, "length", "", text) == "degenerate"


def test_the_longest_completion_is_judged_in_an_instant() -> None:
    longest = [
        table(900),
        list(range(4000)) + list(range(4000)),
        [7] * 8000 + [8] + [7] * 31,
        list(Path(__file__).read_bytes() * 3)[:8192],
    ]
    before = time.process_time()
    assert [loop_period(ids) for ids in longest] == [None] * 4
    assert time.process_time() - before < 0.2  # it takes 5 ms; the event loop waits for it
