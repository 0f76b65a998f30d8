"""One phase of the evaluation: all that is asked of one server.

The sets' measurements and the replay are kept in a file each, as soon as they are whole: a replay that
fails or is killed takes nothing of what was measured before it.
"""

import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.evaluation.measurement import Measurement, measure
from eagle3_pipeline.evaluation.replay import Conversation, Replay, replay
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts.prompt import Prompt

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

REPLAY_NAME = "replay-with-draft.json"
"""The file that keeps the replay."""
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
    """The name of the file that keeps the measurements of a phase."""
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
    """All sets on one server, then `conversations`; each of both is kept from an earlier attempt.

    What was measured on another machine is not kept. No server is opened where all is there.
    """
    from eagle3_pipeline.serving.specification import evaluation_server

    spec = evaluation_server(lineage, draft=draft)
    # Speeds are compared, so both phases must come from the same machine.
    identity = {"format": 3, "server": spec.fingerprint, "host": socket.gethostname(), "sets": list(sets)}
    path = folder / phase_file(draft)
    words = "with the draft" if draft else "without the draft"
    measured = _kept(path, identity, _measurements)
    replayed = _kept(folder / REPLAY_NAME, identity, Replay.from_json) if conversations else None
    if measured is not None:
        logger.info("%s: measured already, kept from %s", words, path.name)
        if replayed is not None or not conversations:
            return Phase(measured, replayed)
    logger.info("starting the server %s", words)
    with server_with(draft) as server:
        if measured is None:
            measured = _measure(lineage, server, sets, words, with_draft=draft is not None)
            write_json(path, {**identity, "found": {name: one.to_json() for name, one in measured.items()}})
        if conversations and replayed is None:
            replayed = _replay(lineage, server, conversations)
            write_json(folder / REPLAY_NAME, {**identity, "found": replayed.to_json()})
    return Phase(measured, replayed)


def _measure(
    lineage: Lineage,
    server: "RunningServer",
    sets: Mapping[str, Sequence[Prompt]],
    words: str,
    *,
    with_draft: bool,
) -> Measurements:
    settings = lineage.recipe.evaluation
    limit = lineage.recipe.generation.request_limit_s(settings.max_completion_tokens)
    return {
        name: measure(
            server,
            prompts,
            settings,
            name=f"{name} {words}",
            with_draft=with_draft,
            request_timeout_s=limit,
        )
        for name, prompts in sets.items()
    }


def _replay(lineage: Lineage, server: "RunningServer", conversations: Sequence[Conversation]) -> Replay:
    longest = max(len(one.reply_token_ids) for one in conversations)
    return replay(
        server,
        conversations,
        speculative_tokens=lineage.recipe.evaluation.speculative_tokens,
        request_timeout_s=lineage.recipe.generation.request_limit_s(longest),
    )


def _measurements(found: dict[str, Any]) -> Measurements:
    return {name: Measurement.from_json(record) for name, record in found.items()}


def _kept(path: Path, identity: dict[str, Any], of: Callable[[dict[str, Any]], _T]) -> _T | None:
    """What `path` keeps, or None where there is none or it is of another server or machine."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text())
        found = value.pop("found")
        return of(found) if value == identity else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(
            f"{path} is no measurement ({error!r}). Delete it to measure its part again."
        ) from error
