"""The draft on the real server: every set without it and with it, and what the difference is.

acceptance_report/<fingerprint>/
    measurement-without-draft.json     kept as soon as it is whole: a kill during the second
    measurement-with-draft.json        server redoes the second only
    report.json  report.md
    manifest.json                      facts: the report
"""

import fcntl
import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.durable_files import write_atomic, write_json
from eagle3_pipeline.errors import Busy, DamagedFile
from eagle3_pipeline.evaluation.measurement import Measurement, measure
from eagle3_pipeline.evaluation.report import report_markdown, summarise, verdict
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.training.training import clean_up

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

logger = logging.getLogger(__name__)

Measurements = dict[str, Measurement]
"""A measurement by the name of its set."""
ServerOpener = Callable[[Path | None], "AbstractContextManager[RunningServer]"]
"""Gives the server to measure: the target alone, or with the draft in a folder. It should stop when left."""


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
    place.folder.mkdir(parents=True, exist_ok=True)
    with _alone(place.folder):
        if (found := place.manifest()) is not None:
            return found
        sets = _read_sets(lineage)
        without = _measure_phase(lineage, server_with, place.folder, sets, None)
        with_draft = _measure_phase(lineage, server_with, place.folder, sets, checkpoint.folder / "draft")
        report = summarise(lineage.recipe.evaluation, without, with_draft)
        report["simulated_acceptance_length"] = trained.get("simulated_acceptance_length")
        write_json(place.folder / "report.json", report)
        write_atomic(place.folder / "report.md", report_markdown(report))
        logger.info(verdict(report))
        names = ("report.json", "report.md", _phase_file(None), _phase_file(checkpoint.folder))
        return place.finish([place.folder / name for name in names], report)


def _read_sets(lineage: Lineage) -> dict[str, list[Prompt]]:
    from eagle3_pipeline.prompts.evaluation import read_set

    sets = {}
    for one in lineage.recipe.evaluation.sets:
        # A prompt that stands twice in its file would be answered twice under one id.
        sets[one.name] = list({prompt.prompt_id: prompt for prompt in read_set(one)}.values())
    return sets


def _phase_file(draft: Path | None) -> str:
    return f"measurement-{'without' if draft is None else 'with'}-draft.json"


def _measure_phase(
    lineage: Lineage,
    server_with: ServerOpener,
    folder: Path,
    sets: dict[str, list[Prompt]],
    draft: Path | None,
) -> Measurements:
    """All sets on one server; kept from an earlier attempt that finished this phase on this machine."""
    from eagle3_pipeline.serving.specification import evaluation_server

    spec = evaluation_server(lineage, draft=draft)
    # Speeds are compared, so both phases must come from the same machine.
    identity = {"format": 1, "server": spec.fingerprint, "host": socket.gethostname(), "sets": list(sets)}
    path = folder / _phase_file(draft)
    words = "with the draft" if draft else "without the draft"
    if (kept := _read_phase(path, identity)) is not None:
        logger.info("%s: measured already, kept from %s", words, path.name)
        return kept
    settings = lineage.recipe.evaluation
    logger.info("starting the server %s", words)
    with server_with(draft) as server:
        measured = {
            name: measure(
                server,
                prompts,
                settings,
                name=f"{name} {words}",
                with_draft=draft is not None,
                request_timeout_s=lineage.recipe.generation.request_limit_s(
                    lineage.recipe.evaluation.max_completion_tokens
                ),
            )
            for name, prompts in sets.items()
        }
    write_json(path, {**identity, "measurements": {name: one.to_json() for name, one in measured.items()}})
    return measured


def _read_phase(path: Path, identity: dict[str, Any]) -> Measurements | None:
    """The phase kept in `path`, or None where there is none or it is of another server or machine."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text())
        measurements = value.pop("measurements")
        if value != identity:
            return None
        return {name: Measurement.from_json(record) for name, record in measurements.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(
            f"{path} is no measurement ({error!r}). Delete it to measure this phase again."
        ) from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second process from measuring this report: both would share one server and slow each other."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Busy(f"{folder} is being measured by another process. Wait for it or stop it.") from error
        yield
