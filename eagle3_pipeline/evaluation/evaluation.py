"""The draft on the real server: every set with it and without it, and what the difference is.

acceptance_report/<fingerprint>/
    measurements.jsonl         each measurement as soon as it is whole: a kill redoes only what it was at
    base-draft/                the base draft as it is served; removed when the report stands
    report.json                the facts
    report.md  report.html     for people
    manifest.json              facts: the report

One server after the other, each started once:

    the draft           at each number of speculative tokens, the headline's first; that one answers the
                        conversations that judged the draft in training, too: see replay.py
    the base draft      where the recipe has one, at the headline
    the target alone    last, for it is asked where greedy replies part: see greedy.py
"""

import logging
import shutil
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.background import repeated
from eagle3_pipeline.durable_files import full_disk_named, write_atomic, write_json
from eagle3_pipeline.evaluation.agreement import compare, explanation
from eagle3_pipeline.evaluation.greedy import greedy_agreement
from eagle3_pipeline.evaluation.grid import Cell, greedy_cell, of_base, of_draft, of_target, token_counts
from eagle3_pipeline.evaluation.kept import Kept
from eagle3_pipeline.evaluation.measured import measured
from eagle3_pipeline.evaluation.measurement import Measurement
from eagle3_pipeline.evaluation.numbers import summarise
from eagle3_pipeline.evaluation.page import PAGE_NAME, report_page
from eagle3_pipeline.evaluation.phase import Bench, Further, Measured, Phase, ServerOpener, measure_phase
from eagle3_pipeline.evaluation.progress import Progress
from eagle3_pipeline.evaluation.replay import Conversation, Replay, conversations_that_judged, replay
from eagle3_pipeline.evaluation.report import report_markdown, sampling_note, verdict
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.progress_file import ProgressFile
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.training.training import clean_up

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

logger = logging.getLogger(__name__)

KEPT_NAME = "measurements.jsonl"
_BASE_FOLDER = "base-draft"
_NEWS_S = 10.0
_FULL_DISK = "Free some space and materialise acceptance_report again: what was measured is kept."


def evaluate_draft(lineage: Lineage, server_with: ServerOpener) -> Manifest:
    """Measure the trained draft on every evaluation set; skipped when the report is there.

    Raises MissingInput (no draft), BadInput (sets), Busy (the server or this report is in use),
    QualityError (counters that show no or contradicting drafts, a draft that changes answers), NotEnoughRoom
    and ServerError.
    """
    place = lineage.acceptance_report()
    clean_up(lineage)  # what a kill at the end of the training left; the training itself is not called again
    if place.manifest() is None:
        with (
            full_disk_named(place.folder, _FULL_DISK),
            Kept(place.folder / KEPT_NAME, place.fingerprint) as kept,
        ):
            if place.manifest() is None:  # else another process made it meanwhile
                _make(lineage, server_with, kept)
    shutil.rmtree(place.folder / _BASE_FOLDER, ignore_errors=True)
    return place.require()


def _make(lineage: Lineage, server_with: ServerOpener, kept: Kept) -> None:
    place = lineage.acceptance_report()
    report = _measure(lineage, server_with, kept)
    write_json(place.folder / "report.json", report)
    write_atomic(place.folder / "report.md", report_markdown(report))
    write_atomic(place.folder / PAGE_NAME, report_page(report))
    logger.info(verdict(report))
    if (sampling := sampling_note(report)) is not None:
        logger.warning(sampling)
    logger.log(logging.INFO if report["simulation_agrees"] else logging.WARNING, explanation(report))
    names = (KEPT_NAME, "report.json", "report.md", PAGE_NAME)
    place.finish([place.folder / name for name in names], report)


def _measure(lineage: Lineage, server_with: ServerOpener, kept: Kept) -> dict[str, Any]:
    """The facts of the report."""
    settings, sets = lineage.recipe.evaluation, _read_sets(lineage)
    judges = conversations_that_judged(lineage)
    drafts, base, alone = _phases(lineage)
    progress = Progress(sum(len(phase.tasks(sets)) for phase in (*drafts, *base, alone)))
    bench = Bench(lineage, server_with, sets, kept, progress)
    with (
        ProgressFile(lineage.progress, "acceptance_report") as news,
        repeated(_NEWS_S, lambda: news.write({"line": progress.line()})),
    ):
        first, replayed = measure_phase(bench, drafts[0], _replay(lineage, judges) if judges else None)
        with_draft: Measured = dict(first)
        for phase in drafts[1:]:
            with_draft |= measure_phase(bench, phase)[0]
        of_base_draft = measure_phase(bench, base[0])[0] if base else None
        cell = greedy_cell(settings)
        compared = _greedy(lineage, cell, with_draft[cell][0]) if cell is not None else None
        without, greedy = measure_phase(bench, alone, compared)
        numbers = summarise(settings, without, with_draft, of_base_draft)
    trained = lineage.draft_checkpoint().require().facts
    return {
        **numbers,
        "greedy": greedy or None,
        **compare(Replay.from_json(replayed) if judges else None, trained, settings),
        "measured": measured(lineage),
    }


def _phases(lineage: Lineage) -> tuple[list[Phase], list[Phase], Phase]:
    """Those with the draft, that with the base draft if there is one, and that of the target alone."""
    settings, tokens = lineage.recipe.evaluation, token_counts(lineage.recipe.evaluation)
    draft = lineage.draft_checkpoint().folder / "draft"
    drafts = [
        Phase(
            "with the draft" + (f", {count} tokens at a time" if len(tokens) > 1 else ""),
            draft,
            count,
            of_draft(settings, count),
        )
        for count in tokens
    ]
    base = []
    if lineage.recipe.base_draft is not None:
        from eagle3_pipeline.training.base_export import export_base

        folder = lineage.acceptance_report().folder / _BASE_FOLDER
        export_base(lineage, folder)
        base.append(Phase("with the base draft", folder, tokens[0], of_base(settings)))
    return drafts, base, Phase("without the draft", None, 0, of_target(settings))


def _replay(lineage: Lineage, judges: list[Conversation]) -> Further:
    recipe = lineage.recipe
    longest = max(len(one.reply_token_ids) for one in judges)

    def ask(server: "RunningServer", _: Measured) -> dict[str, Any]:
        return replay(
            server,
            judges,
            speculative_tokens=recipe.evaluation.speculative_tokens,
            request_timeout_s=recipe.generation.request_limit_s(longest),
        ).to_json()

    return Further("replay", f"{len(judges)} conversations that judged the draft", ask)


def _greedy(lineage: Lineage, cell: Cell, with_draft: dict[str, Measurement]) -> Further:
    """The comparison with the replies of the target alone, which are there when the server is asked."""
    drafted = _named(with_draft, "replies")

    def ask(server: "RunningServer", without: Measured) -> dict[str, Any]:
        (plain, *_), (other, *_) = without[cell.alone], without[cell.other_batch]
        return greedy_agreement(
            server,
            _named(plain, "prompts"),
            plain=_named(plain, "replies"),
            other_batch=_named(other, "replies"),
            with_draft=drafted,
            request_timeout_s=lineage.recipe.generation.request_limit_s(1),
        )

    return Further(f"greedy {fingerprint(drafted)[:12]}", "where greedy replies part", ask)


def _named(found: dict[str, Measurement], field: str) -> dict[str, tuple[int, ...]]:
    """Token ids of all sets, by names that say the set as well."""
    return {
        f"{name} {prompt_id}": ids
        for name, one in found.items()
        for prompt_id, ids in getattr(one, field).items()
    }


def _read_sets(lineage: Lineage) -> dict[str, list[Prompt]]:
    from eagle3_pipeline.prompts.evaluation import read_set

    sets = {}
    for one in lineage.recipe.evaluation.sets:
        # A prompt that stands twice in its file would be answered twice under one id.
        sets[one.name] = list({prompt.prompt_id: prompt for prompt in read_set(one)}.values())
    return sets
