"""The draft on the real server: every set without it and with it, and what the difference is.

acceptance_report/<fingerprint>/
    measurement-without-draft.json     each kept as soon as it is whole: a kill during the second
    measurement-with-draft.json        server redoes only what that one was at
    replay-with-draft.json             where conversations judged
    report.json  report.md
    manifest.json                      facts: the report

The server with the draft answers the conversations that judged it in training, too: see replay.py.
"""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3_pipeline.durable_files import write_atomic, write_json
from eagle3_pipeline.errors import Busy
from eagle3_pipeline.evaluation.agreement import compare, explanation
from eagle3_pipeline.evaluation.phase import REPLAY_NAME, ServerOpener, measure_phase, phase_file
from eagle3_pipeline.evaluation.replay import conversations_that_judged
from eagle3_pipeline.evaluation.report import report_markdown, summarise, verdict
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.training.training import clean_up

logger = logging.getLogger(__name__)


def evaluate_draft(lineage: Lineage, server_with: ServerOpener) -> Manifest:
    """Measure the trained draft on every evaluation set; skipped when the report is there.

    Raises MissingInput (no draft), BadInput (sets), Busy (the server or this report is in use),
    QualityError (counters that show no or contradicting drafts) and ServerError.
    """
    place = lineage.acceptance_report()
    clean_up(lineage)  # what a kill at the end of the training left; the training itself is not called again
    if (found := place.manifest()) is not None:
        return found
    checkpoint = lineage.draft_checkpoint()
    trained = checkpoint.require().facts
    draft, settings = checkpoint.folder / "draft", lineage.recipe.evaluation
    place.folder.mkdir(parents=True, exist_ok=True)
    with _alone(place.folder):
        if (found := place.manifest()) is not None:
            return found
        sets, judges = _read_sets(lineage), conversations_that_judged(lineage)
        without = measure_phase(lineage, server_with, place.folder, sets)
        with_draft = measure_phase(
            lineage, server_with, place.folder, sets, draft=draft, conversations=judges
        )
        report = summarise(settings, without.measurements, with_draft.measurements)
        report |= compare(with_draft.replay, trained, settings)
        write_json(place.folder / "report.json", report)
        write_atomic(place.folder / "report.md", report_markdown(report))
        logger.info(verdict(report))
        logger.log(logging.INFO if report["simulation_agrees"] else logging.WARNING, explanation(report))
        names = ["report.json", "report.md", phase_file(None), phase_file(draft)]
        if judges:
            names.append(REPLAY_NAME)
        return place.finish([place.folder / name for name in names], report)


def _read_sets(lineage: Lineage) -> dict[str, list[Prompt]]:
    from eagle3_pipeline.prompts.evaluation import read_set

    sets = {}
    for one in lineage.recipe.evaluation.sets:
        # A prompt that stands twice in its file would be answered twice under one id.
        sets[one.name] = list({prompt.prompt_id: prompt for prompt in read_set(one)}.values())
    return sets


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second process from measuring this report: both would share one server and slow each other."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Busy(f"{folder} is being measured by another process. Wait for it or stop it.") from error
        yield
