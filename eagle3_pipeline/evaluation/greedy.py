"""Does the draft change what the target says? Greedy replies with it and without it.

Speculation only proposes: each token of a reply is the target's own choice. But a step with a draft checks
several tokens at once, and a sum that is made in another order rounds differently, so that of two nearly
equal tokens either may win; from there on the replies have nothing in common. Two runs of the target alone
at different batch sizes do that as well, and are the measure of how often it may happen.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

Replies = Mapping[str, Sequence[int]]
"""Token ids of a reply by the name of its prompt."""


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

    Returns the facts `greedy` of the report: `compared` (prompts), `differ_with_draft`, `differ_plain` (replies
    that are not those of `plain`), `asked` (places where replies part, of which the target was asked), `bound`,
    `largest_gap`, `largest_gap_plain` (log-probabilities, 0.0 where nothing differs), `passed` (True).

    Raises QualityError where the draft changes answers, ServerDied and ServerError.
    """
    raise NotImplementedError
