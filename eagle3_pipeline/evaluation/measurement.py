"""One prompt set against one running server: replies, speed, and what the server counted meanwhile.

    warm-up requests | scrape | the set's prompts, in_flight at a time | scrape
                              |<------------- wall_seconds ---------->|

The warm-up is outside of the counters and the clock. A server that has answered the same prompts before still
has them in its prefix cache, so each measurement has a salt of its own: all of them find it empty.
"""

import logging
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from eagle3_pipeline.background import run_in_background
from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.counting import count_replies, metrics_at_rest
from eagle3_pipeline.evaluation.replies import Question, Round
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.recipe.evaluation import Evaluation

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

logger = logging.getLogger(__name__)

_WARM_UP_REQUESTS = 3
_WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Measurement:
    """What one set gave on one server. `acceptance` is None without a draft."""

    replies: dict[str, tuple[int, ...]]
    """Token ids by prompt id."""
    prompts: dict[str, tuple[int, ...]]
    """Token ids of the prompts as the server made them, by prompt id."""
    answered: int
    refused: tuple[str, ...]
    """Ids of the prompts that the server answered with HTTP 400 (longer than its context)."""
    output_tokens: int
    wall_seconds: float
    request_seconds: float
    """Sum over the requests; more than `wall_seconds` where several are in flight."""
    acceptance: AcceptanceCounts | None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all requests together per second of wall time."""
        return self.output_tokens / self.wall_seconds

    @property
    def seconds_per_output_token(self) -> float:
        """What one user waits per token, the prompt's processing included."""
        return self.request_seconds / self.output_tokens

    def to_json(self) -> dict[str, Any]:
        """The measurement as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """The measurement that `to_json` wrote."""
        counts = record["acceptance"]
        return cls(
            replies={prompt_id: tuple(ids) for prompt_id, ids in record["replies"].items()},
            prompts={prompt_id: tuple(ids) for prompt_id, ids in record["prompts"].items()},
            answered=record["answered"],
            refused=tuple(record["refused"]),
            output_tokens=record["output_tokens"],
            wall_seconds=record["wall_seconds"],
            request_seconds=record["request_seconds"],
            acceptance=None if counts is None else AcceptanceCounts.from_json(counts),
        )


def measure(
    server: "RunningServer",
    prompts: Sequence[Prompt],
    settings: Evaluation,
    *,
    name: str,
    with_draft: bool,
    request_timeout_s: float,
    seed: int | None = None,
) -> Measurement:
    """Answer `prompts` (the first turn of each) and measure; `name` is for the log.

    With a `seed` each sampled reply has one of its own that follows from it and the prompt.

    Raises BadInput (no prompts, or all refused), Busy (somebody else used the server), QualityError (no or
    contradicting counts), ServerDied and ServerError.
    """
    if not prompts:
        raise BadInput(f"the evaluation set {name} has no prompts. Check its path and column in the recipe.")
    run = Round(server, name, in_flight=settings.concurrency, request_timeout_s=request_timeout_s)
    cold = metrics_at_rest(server, 0)
    short = settings.model_copy(
        update={"max_completion_tokens": min(_WARM_UP_TOKENS, settings.max_completion_tokens)}
    )
    warm_up = _questions(prompts[: max(_WARM_UP_REQUESTS, settings.concurrency)], short, None)
    warmed = run_in_background(lambda: run.answer(warm_up))
    before = cold.generation_tokens + sum(len(reply.token_ids) for reply in warmed.values())
    questions = _questions(prompts, settings, seed)
    counted = count_replies(server, name, run, questions, before=before)
    refused = tuple(prompt.prompt_id for prompt in prompts if prompt.prompt_id not in counted.replies)
    if not counted.output_tokens:
        raise BadInput(
            f"the evaluation set {name}: {len(refused)} of {len(prompts)} prompts refused, no token came back"
        )
    result = Measurement(
        replies={prompt_id: reply.token_ids for prompt_id, reply in counted.replies.items()},
        prompts={prompt_id: reply.prompt_token_ids for prompt_id, reply in counted.replies.items()},
        answered=len(counted.replies),
        refused=refused,
        output_tokens=counted.output_tokens,
        wall_seconds=counted.wall_seconds,
        request_seconds=sum(reply.seconds for reply in counted.replies.values()),
        acceptance=counted.acceptance(name, settings.speculative_tokens, server) if with_draft else None,
    )
    logger.info(
        f"{name}: {result.output_tokens} tokens in {result.wall_seconds:.1f} s, "
        f"{result.tokens_per_second:.1f} tokens/s"
    )
    return result


def _questions(prompts: Sequence[Prompt], settings: Evaluation, seed: int | None) -> list[Question]:
    salt = uuid.uuid4().hex
    questions = []
    for prompt in prompts:
        question = Question.first_turn(
            prompt, max_tokens=settings.max_completion_tokens, temperature=settings.temperature
        )
        body = {**question.body, "cache_salt": salt}
        if seed is not None and settings.temperature:
            body["seed"] = int(fingerprint([prompt.prompt_id, seed])[:8], 16)
        questions.append(replace(question, body=body))
    return questions
