"""The acceptance report: numbers by set and overall, as JSON values, as a text table and as Markdown.

acceptance_length           1 + accepted / drafts, pooled over the sets
acceptance_by_position      share of all drafts whose k-th token was accepted
tokens_per_second_{with,without}    output tokens per second of wall time
speedup                     the ratio of these two
identical_share             at temperature 0: replies that have the same ids with and without the draft
simulat*                    what training simulated, and what was served of it: see agreement.py
"""

from typing import Any

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.agreement import explanation, rows_of_comparison
from eagle3_pipeline.evaluation.measurement import Measurement
from eagle3_pipeline.recipe.evaluation import Evaluation

# Two measurements of the very same server differ by a few per cent; less than this is called no difference.
_NOISE = 0.03


def summarise(
    settings: Evaluation, without: dict[str, Measurement], with_draft: dict[str, Measurement]
) -> dict[str, Any]:
    """The report of two phases over the same sets; raises QualityError if they cannot be compared."""
    sets = {name: _compare(name, settings, [without[name]], [with_draft[name]]) for name in with_draft}
    overall = _compare("all sets", settings, list(without.values()), list(with_draft.values()))
    return {
        **overall,
        "sets": sets,
        "speculative_tokens": settings.speculative_tokens,
        "temperature": settings.temperature,
        "in_flight": settings.concurrency,
        "max_completion_tokens": settings.max_completion_tokens,
    }


def _compare(
    name: str, settings: Evaluation, without: list[Measurement], with_draft: list[Measurement]
) -> dict[str, Any]:
    if any(one.refused != other.refused for one, other in zip(without, with_draft, strict=True)):
        raise QualityError(
            f"{name}: the server with the draft refused other prompts than the one without, so their speeds "
            "are not comparable. Set server.evaluation.max_model_len lower, or leave long prompts out of the "
            "set."
        )
    counts = AcceptanceCounts.sum(one.acceptance for one in with_draft if one.acceptance is not None)
    fast, slow = _speed(with_draft), _speed(without)
    pairs = [
        (ids, other.replies[prompt_id])
        for one, other in zip(without, with_draft, strict=True)
        for prompt_id, ids in one.replies.items()
    ]
    return {
        "prompts": len(pairs),
        "refused": sum(len(one.refused) for one in with_draft),
        "acceptance_length": counts.acceptance_length,
        "acceptance_by_position": list(counts.acceptance_by_position),
        "drafts": counts.drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "tokens_per_second_with": fast["tokens_per_second"],
        "tokens_per_second_without": slow["tokens_per_second"],
        "speedup": fast["tokens_per_second"] / slow["tokens_per_second"],
        "seconds_per_output_token_with": fast["seconds_per_output_token"],
        "seconds_per_output_token_without": slow["seconds_per_output_token"],
        "wall_seconds_with": fast["wall_seconds"],
        "wall_seconds_without": slow["wall_seconds"],
        "output_tokens_with": fast["output_tokens"],
        "output_tokens_without": slow["output_tokens"],
        "identical_share": None if settings.temperature else sum(a == b for a, b in pairs) / len(pairs),
    }


def _speed(parts: list[Measurement]) -> dict[str, float]:
    tokens = sum(part.output_tokens for part in parts)
    wall = sum(part.wall_seconds for part in parts)
    return {
        "tokens_per_second": tokens / wall,
        "seconds_per_output_token": sum(part.request_seconds for part in parts) / tokens,
        "wall_seconds": wall,
        "output_tokens": tokens,
    }


def verdict(report: dict[str, Any]) -> str:
    """Whether the draft helped on this machine, in one honest sentence or two."""
    speedup, length = report["speedup"], report["acceptance_length"]
    speeds = (
        f"{report['tokens_per_second_with']:.1f} tokens/s with it, {report['tokens_per_second_without']:.1f} "
        f"without ({speedup:.2f} x)"
    )
    gained = f"acceptance length {length:.2f} of at most {1 + report['speculative_tokens']}"
    if abs(speedup - 1) <= _NOISE:
        return f"The draft makes no measurable difference to speed on this machine: {speeds}; {gained}."
    if speedup > 1:
        return f"The draft makes serving faster on this machine: {speeds}; {gained}."
    return (
        f"The draft makes serving SLOWER on this machine: {speeds}; {gained}. Each step costs the draft's "
        f"own passes and the check of {1 + report['speculative_tokens']} tokens instead of one; that is "
        "cheap only where reading the target's weights is what a step waits for (a GPU, a large target, "
        "few requests in flight)."
    )


def _rows(report: dict[str, Any]) -> list[list[str]]:
    positions = range(1, report["speculative_tokens"] + 1)
    rows = [
        [
            "set",
            "prompts",
            "length",
            *(f"pos {k}" for k in positions),
            "tok/s with",
            "without",
            "speed-up",
            "same",
        ]
    ]
    for name, numbers in [*report["sets"].items(), ("all", report)]:
        same = numbers["identical_share"]
        rows.append(
            [
                name,
                str(numbers["prompts"]),
                f"{numbers['acceptance_length']:.3f}",
                *(f"{share:.3f}" for share in numbers["acceptance_by_position"]),
                f"{numbers['tokens_per_second_with']:.1f}",
                f"{numbers['tokens_per_second_without']:.1f}",
                f"{numbers['speedup']:.2f}",
                "-" if same is None else f"{same:.0%}",
            ]
        )
    return rows


def _notes(report: dict[str, Any]) -> list[str]:
    notes = [
        verdict(report),
        f"Counted by the server over {report['drafts']} drafts: temperature {report['temperature']:g}, "
        f"{report['in_flight']} in flight, at most {report['max_completion_tokens']} tokens a reply.",
    ]
    same = report["identical_share"]
    if same is not None and same < 1:
        notes.append(
            f"{same:.0%} of the replies are identical with and without the draft. Checking several "
            "tokens at once rounds differently, which can tip the choice between nearly equal ones."
        )
    if report["refused"]:
        notes.append(f"{report['refused']} prompts are longer than the server's context and were left out.")
    return [*notes, explanation(report)]


def report_table(report: dict[str, Any]) -> str:
    """The report for a terminal: a table of plain text and what it means. Takes the facts or report.json."""
    rows = _rows(report)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", *_notes(report)]) + "\n"


def report_markdown_table(report: dict[str, Any]) -> str:
    """The report's numbers as a Markdown table."""
    return _markdown(_rows(report))


def _markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    aligned = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, aligned, *body]) + "\n"


def report_markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown document."""
    *notes, agreement = _notes(report)
    parts = ["# Acceptance", "", report_markdown_table(report), "\n\n".join(notes), ""]
    parts += ["## Simulated and served", ""]
    if compared := rows_of_comparison(report):
        parts.append(_markdown([list(compared[0]), *(list(row.values()) for row in compared)]))
    return "\n".join([*parts, agreement, ""])
