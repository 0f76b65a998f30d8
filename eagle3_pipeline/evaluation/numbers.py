"""The numbers of the acceptance report, as JSON values: of the headline, by set, by cell of the grid.

acceptance_length           1 + accepted / drafts, pooled over sets and repeats
acceptance_by_position      share of all drafts whose k-th token was accepted
tokens_per_second_{with,without}    output tokens per second of wall time, the median of the repeats
speedup                     the ratio of these two medians
speedup_{least,most}        of the ratios of the i-th repeat with the draft and the i-th without; the speed-up
                            itself where not both were measured as often
identical_share             at temperature 0: replies that have the same ids with and without the draft
wall_seconds_*, output_tokens_*     sums over the repeats
"""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.grid import Cell, cells
from eagle3_pipeline.evaluation.measurement import Measurement
from eagle3_pipeline.evaluation.phase import Measured
from eagle3_pipeline.recipe.evaluation import Evaluation

Repeats = Sequence[Sequence[Measurement]]
"""Of each repeat the measurements that are pooled."""


def summarise(
    settings: Evaluation, without: Measured, with_draft: Measured, base: Measured | None = None
) -> dict[str, Any]:
    """The report's numbers; raises QualityError where prompts or counts cannot be compared.

    `with_draft` has every cell of the grid, `base` the headline, `without` the `alone` of each.
    """

    def numbers(measured: Measured, cell: Cell) -> dict[str, Any]:
        return _of_cell(measured[cell], without[cell.alone])

    every = cells(settings)
    grid = [{**asdict(cell), **numbers(with_draft, cell)} for cell in every]
    return {
        **grid[0],
        "max_completion_tokens": settings.max_completion_tokens,
        "grid": grid,
        "base": None if base is None else numbers(base, every[0]),
    }


def _of_cell(
    with_draft: list[dict[str, Measurement]], without: list[dict[str, Measurement]]
) -> dict[str, Any]:
    def only(repeats: list[dict[str, Measurement]], names: Sequence[str]) -> Repeats:
        return [[repeat[name] for name in names] for repeat in repeats]

    sets = list(with_draft[0])
    return {
        **_compare("all sets", only(with_draft, sets), only(without, sets)),
        "sets": {name: _compare(name, only(with_draft, [name]), only(without, [name])) for name in sets},
    }


def _compare(name: str, with_draft: Repeats, without: Repeats) -> dict[str, Any]:
    _require_same_prompts(name, with_draft, without)
    counts = AcceptanceCounts.sum(
        one.acceptance for repeat in with_draft for one in repeat if one.acceptance is not None
    )
    fast, slow = _speed(with_draft), _speed(without)
    speedup = median(fast["tokens_per_second"]) / median(slow["tokens_per_second"])
    pairs = zip(fast["tokens_per_second"], slow["tokens_per_second"], strict=False)
    ratios = [a / b for a, b in pairs] if len(with_draft) == len(without) else [speedup]
    return {
        "prompts": sum(one.answered for one in with_draft[0]),
        "refused": sum(len(one.refused) for one in with_draft[0]),
        "repeats": len(with_draft),
        "acceptance_length": counts.acceptance_length,
        "acceptance_by_position": list(counts.acceptance_by_position),
        "drafts": counts.drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "tokens_per_second_with": median(fast["tokens_per_second"]),
        "tokens_per_second_without": median(slow["tokens_per_second"]),
        "speedup": speedup,
        "speedup_least": min(ratios),
        "speedup_most": max(ratios),
        "seconds_per_output_token_with": median(fast["seconds_per_output_token"]),
        "seconds_per_output_token_without": median(slow["seconds_per_output_token"]),
        "wall_seconds_with": sum(fast["wall_seconds"]),
        "wall_seconds_without": sum(slow["wall_seconds"]),
        "output_tokens_with": sum(one.output_tokens for repeat in with_draft for one in repeat),
        "output_tokens_without": sum(one.output_tokens for repeat in without for one in repeat),
        "identical_share": _identical_share(with_draft[0], without[0]),
    }


def _require_same_prompts(name: str, with_draft: Repeats, without: Repeats) -> None:
    refused = {tuple(one.refused for one in repeat) for repeat in (*with_draft, *without)}
    if len(refused) > 1:
        raise QualityError(
            f"{name}: the server with the draft refused other prompts than the one without, so their speeds "
            "are not comparable. Set server.evaluation.max_model_len lower, or leave long prompts out of the "
            "set."
        )


def _speed(repeats: Repeats) -> dict[str, list[float]]:
    """Each speed of each repeat, pooled over its measurements."""
    tokens = [sum(one.output_tokens for one in repeat) for repeat in repeats]
    wall = [sum(one.wall_seconds for one in repeat) for repeat in repeats]
    waited = [sum(one.request_seconds for one in repeat) for repeat in repeats]
    return {
        "tokens_per_second": [a / b for a, b in zip(tokens, wall, strict=True)],
        "seconds_per_output_token": [a / b for a, b in zip(waited, tokens, strict=True)],
        "wall_seconds": wall,
    }


def _identical_share(with_draft: Sequence[Measurement], without: Sequence[Measurement]) -> float | None:
    """None where no replies are kept, for they were sampled."""
    same = [
        reply == other.replies[prompt_id]
        for one, other in zip(with_draft, without, strict=True)
        for prompt_id, reply in one.replies.items()
    ]
    return sum(same) / len(same) if same else None
