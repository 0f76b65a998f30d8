"""The verdict on one reply, from its token ids and texts alone.

    degenerate   it ends in a loop: a block of p tokens, three times or more, to the very end
    empty        there is no answer
    truncated    it ran into the token limit
    good         all others

A loop is judged on token ids, and its copies must be verbatim: the rows of a real table differ in a
cell each, so that they break the period once per row, however long the table is. A loop that counts
("Step 41: ... Step 42: ...") looks like such a table and is therefore kept.
"""

from collections.abc import Sequence

from eagle3_pipeline.samples.sample import Verdict

# A block of a few tokens has to fill this many more than its first copy. The legitimate endings that
# repeat (closing brackets, a ruler, "ha ha ha") are shorter.
_LOOP_TOKENS = 32
_LOOP_COPIES = 3


def screen(completion_token_ids: Sequence[int], finish_reason: str, content: str, reasoning: str) -> Verdict:
    """The verdict on a reply that the server gave; `refused` is not among them."""
    stopped = finish_reason == "stop"
    # The closing end-of-turn id comes after a loop that the model ended by itself.
    body = completion_token_ids[:-1] if stopped else completion_token_ids
    if finish_reason == "repetition" or loop_period(body) is not None:
        return "degenerate"
    if finish_reason == "length":
        return "truncated" if content.strip() or reasoning.strip() else "empty"
    return "good" if content.strip() else "empty"


def loop_period(token_ids: Sequence[int]) -> int | None:
    """The length in tokens of the block that repeats to the end of `token_ids`, or None."""
    for period in range(1, len(token_ids) // _LOOP_COPIES + 1):
        # It runs between the replies of hundreds of requests, so most periods end at this comparison.
        if token_ids[-1] != token_ids[-1 - period]:
            continue
        if all(_repeats(token_ids, period, tokens) for tokens in (_LOOP_TOKENS, period * (_LOOP_COPIES - 1))):
            return period
    return None


def _repeats(token_ids: Sequence[int], period: int, tokens: int) -> bool:
    """Whether the last `tokens` tokens each equal the one `period` before."""
    start = len(token_ids) - tokens
    return start >= period and token_ids[start:] == token_ids[start - period : -period]
