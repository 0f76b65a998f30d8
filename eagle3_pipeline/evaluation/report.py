"""The acceptance report in words: a verdict, a table of plain text, and a Markdown document.

All take the facts of acceptance_report, or report.json: see numbers.py, agreement.py and greedy.py.
"""

from typing import Any

from eagle3_pipeline.evaluation.agreement import explanation, rows_of_comparison
from eagle3_pipeline.evaluation.tables import Rows, by_set, fixed, percent, rows_of_base, rows_of_grid, spread
from eagle3_pipeline.known_vllm import samples_beside_draft

# Two measurements of the very same server differ by a few per cent; less than this is called no difference.
_NOISE = 0.03


def verdict(report: dict[str, Any]) -> str:
    """Whether the draft helped on this machine, in one honest sentence or two."""
    speedup, length = report["speedup"], report["acceptance_length"]
    least, most = report["speedup_least"], report["speedup_most"]
    between = f"; {spread(report)} x over {report['repeats']} repeats" if least < most else ""
    speeds = (
        f"{report['tokens_per_second_with']:.1f} tokens/s with it, {report['tokens_per_second_without']:.1f} "
        f"without ({speedup:.2f} x{between})"
    )
    gained = f"acceptance length {length:.2f} of at most {1 + report['speculative_tokens']}"
    if abs(speedup - 1) <= _NOISE or least <= 1 <= most:
        return f"The draft makes no measurable difference to speed on this machine: {speeds}; {gained}."
    if speedup > 1:
        return f"The draft makes serving faster on this machine: {speeds}; {gained}."
    return (
        f"The draft makes serving SLOWER on this machine: {speeds}; {gained}. Each step costs the draft's "
        f"own passes and the check of {1 + report['speculative_tokens']} tokens instead of one; that is "
        "cheap only where reading the target's weights is what a step waits for (a GPU, a large target, "
        "few requests in flight)."
    )


def sampling_note(report: dict[str, Any]) -> str | None:
    """That cells above temperature 0 say nothing, where the server's vLLM samples wrongly beside a draft."""
    vllm = report["measured"]["server"]["vllm"]
    sampled = sorted({cell["temperature"] for cell in report["grid"] if cell["temperature"]})
    if not sampled or samples_beside_draft(vllm):
        return None
    return (
        f"The numbers at temperature {', '.join(f'{one:g}' for one in sampled)} say nothing of the draft: "
        f"{vllm} ignores the temperature of a request while a draft proposes. Measure them on a GPU."
    )


def _rows(report: dict[str, Any]) -> Rows:
    return [
        {
            "set": name,
            "prompts": str(numbers["prompts"]),
            "length": fixed(numbers["acceptance_length"]),
            **{f"pos {k}": fixed(share) for k, share in enumerate(numbers["acceptance_by_position"], 1)},
            "tok/s with": fixed(numbers["tokens_per_second_with"], 1),
            "without": fixed(numbers["tokens_per_second_without"], 1),
            "speed-up": fixed(numbers["speedup"], 2),
            "spread": spread(numbers),
            "same": percent(numbers["identical_share"]),
        }
        for name, numbers in by_set(report)
    ]


def _further(report: dict[str, Any]) -> dict[str, Rows]:
    """The tables that not every report has, by their heading."""
    grid = rows_of_grid(report)
    tables = {"Other settings": grid if len(grid) > 1 else [], "Beside the base draft": rows_of_base(report)}
    return {heading: rows for heading, rows in tables.items() if rows}


def _notes(report: dict[str, Any]) -> list[str]:
    notes = [
        verdict(report),
        f"Counted by the server over {report['drafts']} drafts: temperature {report['temperature']:g}, "
        f"{report['in_flight']} in flight, at most {report['max_completion_tokens']} tokens a reply.",
    ]
    if (sampling := sampling_note(report)) is not None:
        notes.append(sampling)
    if report["greedy"] is not None:
        notes.append(greedy_note(report["greedy"]))
    if report["refused"]:
        notes.append(f"{report['refused']} prompts are longer than the server's context and were left out.")
    return [*notes, explanation(report)]


def greedy_note(found: dict[str, Any]) -> str:
    """What the comparison of greedy replies showed; `found` is the report's `greedy`."""
    differ, plain = found["differ_with_draft"], found["differ_plain"]
    text = (
        f"Of {found['compared']} greedy replies {differ} differ with the draft, {plain} between two runs "
        "without it at different batch sizes."
    )
    if not differ:
        return text
    return (
        f"{text} Where replies part with the draft, the target's own log-probabilities are at most "
        f"{found['largest_gap']:.3f} apart (bound {found['bound']:.3f}): checking several tokens at once "
        "rounds differently, which can tip the choice between nearly equal ones."
    )


def report_table(report: dict[str, Any]) -> str:
    """The report for a terminal: tables of plain text and what they mean."""
    further = [f"{heading}\n{aligned(rows)}" for heading, rows in _further(report).items()]
    return "\n\n".join([aligned(_rows(report)), *further, "\n".join(_notes(report))]) + "\n"


def aligned(rows: Rows) -> str:
    """A table of plain text, numbers at the right."""
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))]
        )
        for first, *rest in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def report_markdown_table(report: dict[str, Any]) -> str:
    """The report's numbers as a Markdown table."""
    return markdown(_rows(report))


def markdown(rows: Rows) -> str:
    """A table in Markdown, numbers at the right."""
    head, *body = list(rows[0]), *(list(row.values()) for row in rows)
    aligned = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, aligned, *body]) + "\n"


def report_markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown document."""
    *notes, agreement = _notes(report)
    parts = ["# Acceptance", "", report_markdown_table(report), "\n\n".join(notes), ""]
    for heading, rows in _further(report).items():
        parts += [f"## {heading}", "", markdown(rows)]
    parts += ["## Simulated and served", ""]
    if compared := rows_of_comparison(report):
        parts.append(markdown(compared))
    return "\n".join([*parts, agreement, ""])
