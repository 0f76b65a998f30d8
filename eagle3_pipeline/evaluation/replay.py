"""The conversations that judged the draft in training, answered once more by the server with the draft.

Training walks over the target's recorded replies and simulates what a server would accept. Here the server
gets the very same prompts and writes the replies again, greedily, so that both numbers are of the same text:

    sample     p0 p1 p2 p3 | c0 c1 c2 c3 <end>
    request    p0 p1 p2 p3, max_tokens 5            as far as its states were extracted
    reply                    c0 c1 c2 c3 <end>      unless nearly equal choices tip the other way
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.counting import count_replies
from eagle3_pipeline.evaluation.replies import Question, Round
from eagle3_pipeline.extraction.plan import planned_shard
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.sample import prompt_id_of

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

# No speed is measured here, so the number is one that any server takes at once.
_IN_FLIGHT = 16
# The first token of a reply is the target's own, from the prompt: a draft proposes from the second on.
_FEWEST_REPLY_TOKENS = 2


@dataclass(frozen=True)
class Conversation:
    """A sample that judged, as far as its states were extracted."""

    sample_id: str
    prompt_token_ids: tuple[int, ...]
    reply_token_ids: tuple[int, ...]

    @property
    def question(self) -> Question:
        """The request for the same reply, by token ids: no template stands between."""
        body = {
            "prompt": list(self.prompt_token_ids),
            "max_tokens": len(self.reply_token_ids),
            "temperature": 0.0,
        }
        return Question(self.sample_id, "/v1/completions", body)


def conversations_that_judged(lineage: Lineage) -> list[Conversation]:
    """The samples of the validation prompts, by the rule of extraction and training.

    One whose states were quarantined is among them, which training did not have. Raises MissingInput and
    DamagedFile.
    """
    recipe = lineage.recipe
    prompts = set(lineage.prompts().require().facts["validation"])
    if not prompts:
        return []
    conversations = []
    for planned in planned_shard(lineage, recipe.shards[0]).samples:
        if prompt_id_of(planned.sample_id) not in prompts:
            continue
        start = planned.loss_mask.index(1)
        prompt, reply = planned.token_ids[:start], planned.token_ids[start:]
        if len(reply) >= _FEWEST_REPLY_TOKENS:
            conversations.append(Conversation(planned.sample_id, tuple(prompt), tuple(reply)))
    return conversations


@dataclass(frozen=True)
class Replay:
    """What the server made of them."""

    served: int
    """Conversations that were answered."""
    refused: int
    """Those that it answered with HTTP 400 (longer than its context)."""
    same: int
    """Replies that have the recorded ids."""
    tokens: int
    """Of all replies."""
    acceptance: AcceptanceCounts | None
    """None where all were refused."""

    @property
    def behind_the_end(self) -> int:
        """Tokens of replies' last steps, the target's own included, that come after the reply's end.

        The server counts the accepted ones among them; the walk ends with the reply.
        """
        if self.acceptance is None:
            return 0
        # A reply is its first token, and what each step of the target adds.
        made = self.acceptance.drafts + self.acceptance.accepted_tokens
        return max(0, made - (self.tokens - self.served))

    def to_json(self) -> dict[str, Any]:
        """The replay as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """The replay that `to_json` wrote."""
        counts = record["acceptance"]
        return cls(**{**record, "acceptance": None if counts is None else AcceptanceCounts.from_json(counts)})


def replay(
    server: "RunningServer",
    conversations: Sequence[Conversation],
    *,
    speculative_tokens: int,
    request_timeout_s: float,
) -> Replay:
    """Have the server with the draft answer `conversations`; raises what `measure` raises."""
    name = "validation conversations"
    run = Round(server, name, in_flight=_IN_FLIGHT, request_timeout_s=request_timeout_s)
    counted = count_replies(server, name, run, [one.question for one in conversations])
    replies = counted.replies
    return Replay(
        served=len(replies),
        refused=len(conversations) - len(replies),
        same=sum(
            replies[one.sample_id].token_ids == one.reply_token_ids
            for one in conversations
            if one.sample_id in replies
        ),
        tokens=counted.output_tokens,
        acceptance=counted.acceptance(name, speculative_tokens, server) if replies else None,
    )
