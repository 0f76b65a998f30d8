"""Does the draft change what the target says? Greedy replies with it and without it.

A draft only proposes: each token of a reply is the target's own choice. But a step that checks proposals
works on several tokens at once, sums are made in another order, and of two nearly equal tokens the other one
may win; from there on the replies have nothing in common. The target alone does that too, at another batch
size. So two plain runs are the measure of two things:

    how often     no more replies differ with the draft than between the plain runs: see `_check_rate`
    how near      where they part, the target finds both tokens nearly equal: see `_check_gaps`
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.evaluation.near_tie import (
    Likeliest,
    Parting,
    Place,
    Replies,
    ask_target,
    described,
    partings,
)

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

FLOOR = 0.5
"""Smallest bound of a gap, as a difference of log-probabilities.

A logit of 16 to 32 is a multiple of 1/8 in bfloat16: rounding moves it by up to 1/16. Two logits in two runs
make 1/4, and the rounding of the states before the head comes to as much again.
"""
MARGIN = 2.0
"""The bound is so many times the largest gap of the plain runs.

Of two samples of the same size and kind, either has the larger maximum: without a margin every other draft
whose gaps are above FLOOR would fail.
"""
UNLIKELY = 0.00135
"""Chance below which more differences are no accident: beyond three standard errors, to one side."""
# Places asked for each pair of runs.
_MOST_ASKED = 64


def other_batch_size(in_flight: int, speculative_tokens: int) -> int:
    """Requests in flight of the second plain run: its steps have as many rows as those that check drafts."""
    return in_flight * (speculative_tokens + 1)


def greedy_agreement(
    server: "RunningServer",
    prompts: Mapping[str, Sequence[int]],
    *,
    plain: Replies,
    other_batch: Replies,
    with_draft: Replies,
    request_timeout_s: float,
) -> dict[str, Any]:
    """Compare greedy replies to the same prompts; `server` is the target alone and is asked about ties.

    `prompts` are the token ids that the server made of each prompt (`Reply.prompt_token_ids`). `plain` and
    `with_draft` have the same number of requests in flight, `other_batch` has `other_batch_size` of it and no
    draft. What one of the four lacks is left out. A name stands in the message: "<set> <prompt id>" is a good
    one. At most 128 requests of one token are made; none where no replies differ.

    Returns the facts `greedy` of the report: `compared` (prompts), `differ_with_draft`, `differ_plain`
    (replies that are not those of `plain`), `asked` (places where replies part of which the target was
    asked), `bound`, `largest_gap`, `largest_gap_plain` (log-probabilities, 0.0 where nothing differs),
    `passed` (True).

    Raises QualityError where the draft changes answers, ServerDied and ServerError.
    """
    names = [name for name in plain if name in prompts and name in other_batch and name in with_draft]
    if not names:
        raise QualityError(
            "no prompt was answered with the draft, without it and at another batch size, so greedy replies "
            "cannot be compared. See which prompts the servers refused."
        )
    between = partings(plain, other_batch, names)
    drafted = partings(plain, with_draft, names)
    places = _asked(between, drafted)
    told = ask_target(server, prompts, plain, places, request_timeout_s=request_timeout_s) if places else {}
    largest_plain = max((gap for gap, _ in _gaps(between, told)), default=0.0)
    bound = max(FLOOR, MARGIN * largest_plain)
    gaps = _gaps(drafted, told)
    _check_gaps(server, gaps, bound)
    _check_rate(server, len(names), between, drafted)
    return {
        "compared": len(names),
        "differ_with_draft": len(drafted),
        "differ_plain": len(between),
        "asked": len(told),
        "bound": bound,
        "largest_gap": max((gap for gap, _ in gaps), default=0.0),
        "largest_gap_plain": largest_plain,
        "passed": True,
    }


def _asked(between: Sequence[Parting], drafted: Sequence[Parting]) -> dict[Place, None]:
    """The places to ask about, each once: those of the draft alone say most, so they come first.

    Where the draft parts as the other plain run does, the plain runs' own places answer for it.
    """
    known = set(between)
    own = [parting for parting in drafted if parting not in known]
    return dict.fromkeys(parting.place for parting in [*_spread(own), *_spread(between)])


def _spread(found: Sequence[Parting]) -> list[Parting]:
    """At most `_MOST_ASKED` of them, at even distances, so that every set has its share."""
    count = min(len(found), _MOST_ASKED)
    return [found[number * len(found) // count] for number in range(count)]


def _gaps(found: Sequence[Parting], told: Mapping[Place, Likeliest]) -> list[tuple[float, Parting]]:
    return [(one.gap(told[one.place]), one) for one in found if one.place in told]


def _check_gaps(server: "RunningServer", gaps: Sequence[tuple[float, Parting]], bound: float) -> None:
    """Raise QualityError where the replies part although the target's choice is clear."""
    clear = [(gap, parting) for gap, parting in gaps if gap > bound]
    if not clear:
        return
    gap, parting = max(clear, key=lambda one: one[0])
    plain, drafted = (described(server, token) for token in parting.tokens)
    raise QualityError(
        f"prompt {parting.name}, token {parting.position + 1} of the greedy reply: {plain} without the "
        f"draft, {drafted} with it. The target's own log-probabilities are {gap:.3f} apart there, which is "
        f"no near tie: the bound is {bound:.3f} ({MARGIN:g} times the largest gap between two runs without a "
        f"draft, at least {FLOOR:g}). It is so at {len(clear)} of {len(gaps)} places that were looked at. "
        f"{_meaning(server)} If the target's generation_config.json sets a penalty, log-probabilities are "
        "not what it chooses by: add --generation-config vllm to server.evaluation.extra_args, measure again."
    )


def _check_rate(
    server: "RunningServer", compared: int, between: Sequence[Parting], drafted: Sequence[Parting]
) -> None:
    """Raise QualityError where more replies differ with the draft than between the plain runs.

    The same prompts are in both, so what counts are those that differ in one of them only: if the draft
    changed nothing, each would be of either kind with the same chance (McNemar's test, exact, one-sided).
    """
    plain_names, draft_names = ({one.name for one in found} for found in (between, drafted))
    with_draft_only, plain_only = len(draft_names - plain_names), len(plain_names - draft_names)
    chance = _chance(with_draft_only, plain_only)
    if chance >= UNLIKELY:
        return
    raise QualityError(
        f"greedy replies: {len(drafted)} of {compared} differ with the draft, but only {len(between)} "
        f"between two runs without it at different batch sizes. {with_draft_only} differ with the draft only "
        f"and {plain_only} between these runs only; if the draft changed nothing, the chance of that would "
        f"be {chance:.2g} (below {UNLIKELY:g} it is no accident). {_meaning(server)}"
    )


def _chance(more: int, fewer: int) -> float:
    """The chance of at least `more` heads in `more + fewer` throws of a coin."""
    throws = more + fewer
    return sum(math.comb(throws, heads) for heads in range(more, throws + 1)) / (1 << throws)


def _meaning(server: "RunningServer") -> str:
    return (
        "So the draft changes answers, which it must not: it only proposes, and each token is the target's "
        "own choice. Either vLLM checks the proposals wrongly (try another version, another attention "
        "backend, enforce_eager), or the two servers run different targets: compare dtype, quantization and "
        f"backends in their logs, of which {server.log} is the one without the draft. Do not serve the draft "
        "with this vLLM until that is found. What was measured is kept."
    )
