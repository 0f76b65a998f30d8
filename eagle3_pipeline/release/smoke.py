"""The released folder on a server: does it speculate there as the report says?

The folder has the checkpoint's bytes and a config that was checked, and still a server may not run them as
they were measured: another vLLM, a file that it reads and nobody looked at. So the folder is served once and
answers the first evaluation set again, as the report's headline did, but with as many requests at once as any
server takes: speed is not looked at.

What is compared are the shares of drafts that were accepted, by position. The replies say nothing of a draft:
the target decides on each token with any draft, and with another number of rows in a step it may decide
otherwise between two that are nearly equal. For the same reason the shares are not expected to be the
report's own, even where it was greedy, but those of another sample of the same drafts.
"""

import logging
import math
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.evaluation.counting import count_replies
from eagle3_pipeline.evaluation.replies import Question, Round
from eagle3_pipeline.lineage import Lineage

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

logger = logging.getLogger(__name__)

_IN_FLIGHT = 16
# Of independent drafts one pair of shares in 16,000 is as far apart. Those of one reply are alike, which
# scatters the shares of sampled replies more; a wrong norm or layer is ten away.
_MOST_ERRORS = 4.0


def smoke(lineage: Lineage, server: "RunningServer") -> dict[str, Any]:
    """Ask `server`, which serves the target with the released folder as its draft, and compare.

    Returns facts for the manifest: `set`, `prompts` (answered), `drafts`, `acceptance_length` and
    `acceptance_by_position` as counted now, `reported_length` and `reported_by_position` as in the report,
    and `standard_errors`, how far the farthest position is from the report's.

    Raises QualityError (no drafts, another number of speculative tokens, another acceptance than the
    report's), Busy (somebody else used the server), MissingInput (no report), ServerDied and ServerError.
    """
    settings, place = lineage.recipe.evaluation, lineage.acceptance_report()
    asked = settings.sets[0].name
    reported = place.require().facts["sets"][asked]
    name = f"{asked} with the released draft"
    limit = lineage.recipe.generation.request_limit_s(settings.max_completion_tokens)
    run = Round(server, name, in_flight=_IN_FLIGHT, request_timeout_s=limit)
    counted = count_replies(server, name, run, _questions(lineage))
    counts = counted.acceptance(name, settings.speculative_tokens, server)
    # A repeat of greedy replies is the same drafts once more and makes the report no surer.
    once = reported["drafts"] / reported["repeats"]
    shares = zip(counts.acceptance_by_position, reported["acceptance_by_position"], strict=True)
    errors = max(standard_errors_apart(now, counts.drafts, then, once) for now, then in shares)
    facts: dict[str, Any] = {
        "set": asked,
        "prompts": len(counted.replies),
        "drafts": counts.drafts,
        "acceptance_length": counts.acceptance_length,
        "acceptance_by_position": list(counts.acceptance_by_position),
        "reported_length": reported["acceptance_length"],
        "reported_by_position": reported["acceptance_by_position"],
        "standard_errors": errors,
    }
    if errors > _MOST_ERRORS:
        raise QualityError(
            "the folder that was to be released is served with another acceptance than the report's: "
            f"{_told(facts)}. The server does not run what was measured: read its log {server.log}. If vLLM "
            f"changed since the report, delete {place.folder} and materialise acceptance_report again."
        )
    logger.info("the released folder serves as the report says: %s", _told(facts))
    return facts


def _questions(lineage: Lineage) -> list[Question]:
    from eagle3_pipeline.prompts.evaluation import read_set

    settings = lineage.recipe.evaluation
    questions = (
        Question.first_turn(
            prompt, max_tokens=settings.max_completion_tokens, temperature=settings.temperature
        )
        for prompt in read_set(settings.sets[0])
    )
    return list({question.name: question for question in questions}.values())


def standard_errors_apart(share: float, drafts: float, other: float, other_drafts: float) -> float:
    """How far two shares are apart, each of so many drafts, in standard errors of their difference.

    The test of two proportions with one pooled variance; 0.0 where both are none, or all.
    """
    pooled = (share * drafts + other * other_drafts) / (drafts + other_drafts)
    error = math.sqrt(max(0.0, pooled * (1 - pooled)) * (1 / drafts + 1 / other_drafts))
    return abs(share - other) / error if error else 0.0


def _told(facts: dict[str, Any]) -> str:
    now, then = (
        ", ".join(f"{share:.3f}" for share in facts[shares])
        for shares in ("acceptance_by_position", "reported_by_position")
    )
    return (
        f"on the set {facts['set']} the shares accepted by position are {now} of {facts['drafts']} drafts, "
        f"{then} in the report ({facts['standard_errors']:.1f} standard errors apart, expected at most "
        f"{_MOST_ERRORS:g})"
    )
