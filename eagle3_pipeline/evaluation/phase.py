"""One phase of the evaluation: all that is asked of one server, kept in a file as soon as it is whole."""

import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.evaluation.measurement import Measurement, measure
from eagle3_pipeline.evaluation.replay import Conversation, Replay, replay
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts.prompt import Prompt

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

logger = logging.getLogger(__name__)

Measurements = dict[str, Measurement]
"""A measurement by the name of its set."""
ServerOpener = Callable[[Path | None], "AbstractContextManager[RunningServer]"]
"""Gives the server to measure: the target alone, or with the draft in a folder. It should stop when left."""


@dataclass(frozen=True)
class Phase:
    """What one server gave."""

    measurements: Measurements
    replay: Replay | None
    """None without the draft, and where no conversation judged it."""


def phase_file(draft: Path | None) -> str:
    """The name of the file that keeps a phase."""
    return f"measurement-{'without' if draft is None else 'with'}-draft.json"


def measure_phase(
    lineage: Lineage,
    server_with: ServerOpener,
    folder: Path,
    sets: Mapping[str, Sequence[Prompt]],
    *,
    draft: Path | None = None,
    conversations: Sequence[Conversation] = (),
) -> Phase:
    """All sets on one server, then `conversations`; kept from an earlier attempt on this machine."""
    from eagle3_pipeline.serving.specification import evaluation_server

    spec = evaluation_server(lineage, draft=draft)
    # Speeds are compared, so both phases must come from the same machine.
    identity = {"format": 2, "server": spec.fingerprint, "host": socket.gethostname(), "sets": list(sets)}
    path = folder / phase_file(draft)
    words = "with the draft" if draft else "without the draft"
    if (kept := _read(path, identity)) is not None:
        logger.info("%s: measured already, kept from %s", words, path.name)
        return kept
    logger.info("starting the server %s", words)
    with server_with(draft) as server:
        phase = _ask(lineage, server, sets, conversations, words, with_draft=draft is not None)
    record = {
        "measurements": {name: one.to_json() for name, one in phase.measurements.items()},
        "replay": None if phase.replay is None else phase.replay.to_json(),
    }
    write_json(path, {**identity, **record})
    return phase


def _ask(
    lineage: Lineage,
    server: "RunningServer",
    sets: Mapping[str, Sequence[Prompt]],
    conversations: Sequence[Conversation],
    words: str,
    *,
    with_draft: bool,
) -> Phase:
    settings, generation = lineage.recipe.evaluation, lineage.recipe.generation
    measured = {
        name: measure(
            server,
            prompts,
            settings,
            name=f"{name} {words}",
            with_draft=with_draft,
            request_timeout_s=generation.request_limit_s(settings.max_completion_tokens),
        )
        for name, prompts in sets.items()
    }
    if not conversations:
        return Phase(measured, None)
    replayed = replay(
        server,
        conversations,
        speculative_tokens=settings.speculative_tokens,
        request_timeout_s=generation.request_limit_s(max(len(one.reply_token_ids) for one in conversations)),
    )
    return Phase(measured, replayed)


def _read(path: Path, identity: dict[str, Any]) -> Phase | None:
    """The phase kept in `path`, or None where there is none or it is of another server or machine."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text())
        measurements, replayed = value.pop("measurements"), value.pop("replay", None)
        if value != identity:
            return None
        return Phase(
            {name: Measurement.from_json(record) for name, record in measurements.items()},
            None if replayed is None else Replay.from_json(replayed),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(
            f"{path} is no measurement ({error!r}). Delete it to measure this phase again."
        ) from error
