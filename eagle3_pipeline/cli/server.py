"""`eagle3 server`: start, stop and look at the vLLM servers of this machine by hand."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_pipeline.cli import server_logs
from eagle3_pipeline.cli.checkout import add_recipe, lineage_of
from eagle3_pipeline.errors import Busy, MissingInput, ServerError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe.server import PHASES

if TYPE_CHECKING:
    from eagle3_pipeline.serving.record import ServerRecord
    from eagle3_pipeline.serving.specification import ServerSpec


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its actions to the parser."""
    server = commands.add_parser("server", help="the vLLM servers of this machine")
    actions = server.add_subparsers(dest="action", required=True, metavar="ACTION")

    start = actions.add_parser("start", help="start a recipe's server, or find it running; it stays")
    add_recipe(start)
    start.add_argument("--phase", choices=PHASES, default=PHASES[0], help="whose server (%(default)s)")
    start.set_defaults(command=_start)

    stop = actions.add_parser("stop", help="stop the servers; one in use is stopped when its users are done")
    stop.add_argument("--force", action="store_true", help="end those in use too, at once")
    stop.set_defaults(command=_stop)

    status = actions.add_parser("status", help="which servers run, who uses them, who holds which GPUs")
    status.set_defaults(command=_status)

    server_logs.add(actions)


def _start(options: argparse.Namespace) -> int:
    from eagle3_pipeline.serving.server import open_server
    from eagle3_pipeline.serving.watcher import stops_at

    lineage = lineage_of(options.recipe)
    spec = _spec(lineage, options.phase)
    try:
        with open_server(spec, lineage.logs) as server:
            record = server.record
    except KeyboardInterrupt:
        print("interrupted. A server that is loading goes on, for the next step; eagle3 server stop ends it")
        raise
    ends = time.strftime("%T", time.localtime(stops_at(record)))
    print(
        f"{record}\n"
        f"  URL          {server.base_url}/v1\n"
        f"  served name  {server.model}\n"
        f"  log          {server.log}\n"
        f"  stops        by itself at {ends} (server.{options.phase}.idle_timeout_s), or by eagle3 server "
        "stop;\n               steps that use it put that off, requests by hand do not"
    )
    return 0


def _spec(lineage: Lineage, phase: str) -> "ServerSpec":
    from eagle3_pipeline.generation.captured_states import capture_staging
    from eagle3_pipeline.serving.specification import evaluation_server, extraction_server, generation_server

    if phase == "generation":
        return generation_server(lineage, capturing=capture_staging(lineage))
    if phase == "extraction":
        return extraction_server(lineage, lineage.staging)
    draft = _draft(lineage)
    print(f"with the draft in {draft}" if draft else "without a draft, for none is trained yet")
    return evaluation_server(lineage, draft)


def _draft(lineage: Lineage) -> Path | None:
    """The trained draft, if everything on the way to it is there."""
    try:
        place = lineage.draft_checkpoint()
        place.require()
    except MissingInput:
        return None
    return place.folder / "draft"


def _stop(options: argparse.Namespace) -> int:
    """Status 1 when a server could not be ended."""
    from eagle3_pipeline.serving.overview import NO_SERVER
    from eagle3_pipeline.serving.record import all_records

    records = list(all_records())
    if not records:
        print(NO_SERVER)
    status = 0
    for record in records:
        try:
            print(f"{record}: {_stop_one(record, force=options.force)}")
        except Busy as error:  # of another user or container; the others can be stopped all the same
            print(f"{record}: left alone. {error}")
        except ServerError as error:
            print(f"{record}: not stopped. {error}")
            status = 1
    return status


def _stop_one(record: "ServerRecord", *, force: bool) -> str:
    from eagle3_pipeline.serving.overview import users_in_words
    from eagle3_pipeline.serving.server import retire

    state, users = record.state(), users_in_words(record)
    stage = retire(record, force=force)
    if stage is None and state == "failed":
        return "was dead; what it left is cleared up"
    if stage is None:
        return f"stopped, while it was used by {users}" if users else "stopped"
    until = "is stopped when that is done" if stage == "draining" else "left alone"
    return f"in use by {users}: {until}. --force ends it at once, and what uses it fails"


def _status(options: argparse.Namespace) -> int:
    from eagle3_pipeline.serving.overview import overview

    print(overview())
    return 0
