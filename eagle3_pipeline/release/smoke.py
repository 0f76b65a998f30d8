"""The released folder on a server: does it speculate there as the report says?

The folder has the checkpoint's bytes and a config that was checked, and still a server may not run them as
they were measured: another vLLM, a file that it reads and nobody looked at. So the folder is served once and
answers the first evaluation set once more, as in the report's headline.

What is compared are the shares of drafts that were accepted, by position. The replies say nothing of a draft:
the target decides on each token with any draft. One at a time and greedily they are the report's own, and so
are the shares. With several in flight the rows of a step are others, which rounds otherwise and may tip the
choice between two nearly equal tokens; from there on the reply is another one, with other shares.
"""

import logging
import math
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.evaluation.measurement import measure
from eagle3_pipeline.lineage import Lineage

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

logger = logging.getLogger(__name__)

# Drafts of one reply are alike: if it runs into a loop, nearly all that follow are accepted. So ten count as
# one. Three errors are then a fall from 0.25 to 0.09 over 1,000 drafts; a wrong norm or layer leaves 0.01.
_COUNT_AS_ONE = 10
_MOST_ERRORS = 3.0


def smoke(lineage: Lineage, server: "RunningServer") -> dict[str, Any]:
    """Ask `server`, which serves the target with the released folder as its draft, and compare.

    Returns facts for the manifest: `set`, `prompts` (answered), `drafts`, `acceptance_length` and
    `acceptance_by_position` as counted now, `reported_length` and `reported_by_position` as in the report,
    and `standard_errors`, how far the farthest position is from the report's.

    Raises QualityError (no drafts, another number of speculative tokens, another acceptance than the
    report's), Busy (somebody else used the server), MissingInput (no report), ServerDied and ServerError.
    """
    from eagle3_pipeline.prompts.evaluation import read_set

    recipe, place = lineage.recipe, lineage.acceptance_report()
    first = recipe.evaluation.sets[0]
    reported = place.require().facts["sets"][first.name]
    measured = measure(
        server,
        list({prompt.prompt_id: prompt for prompt in read_set(first)}.values()),
        recipe.evaluation,
        name=f"{first.name} with the released draft",
        with_draft=True,
        request_timeout_s=recipe.generation.request_limit_s(recipe.evaluation.max_completion_tokens),
    )
    counts = measured.acceptance
    assert counts is not None
    # A repeat of greedy replies is the same drafts once more and makes the report no surer.
    drafts, reported_drafts = counts.drafts, reported["drafts"] / reported["repeats"]
    errors = max(
        standard_errors_apart(now, drafts / _COUNT_AS_ONE, then, reported_drafts / _COUNT_AS_ONE)
        for now, then in zip(counts.acceptance_by_position, reported["acceptance_by_position"], strict=True)
    )
    facts: dict[str, Any] = {
        "set": first.name,
        "prompts": measured.answered,
        "drafts": drafts,
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


def standard_errors_apart(share: float, drafts: float, other: float, other_drafts: float) -> float:
    """How far two shares are apart, each of so many independent drafts, in errors of their difference.

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
