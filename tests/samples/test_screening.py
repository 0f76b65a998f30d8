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


def test_the_longest_completion_is_judged_in_an_instant() -> None:
    assert loop_period(table(900)) is None
    assert loop_period(list(range(4000)) + list(range(4000))) is None
