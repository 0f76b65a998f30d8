"""`eagle3 server logs`: what a server printed, and prints."""

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from eagle3_pipeline.cli.checkout import add_recipe, lineage_of
from eagle3_pipeline.errors import MissingInput

if TYPE_CHECKING:
    from eagle3_pipeline.serving.record import ServerRecord

_POLL_S = 0.2


def add(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the action to the parser of `eagle3 server`."""
    logs = actions.add_parser("logs", help="what a server printed: the running one, or the last of a recipe")
    which = logs.add_mutually_exclusive_group()
    which.add_argument("name", nargs="?", help="served name or phase, where several servers run")
    add_recipe(which, default=None)
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the server ends, or Ctrl-C")
    logs.set_defaults(command=_logs)


def _logs(options: argparse.Namespace) -> int:
    from eagle3_pipeline.serving.record import all_records

    records = list(all_records())
    if options.recipe is not None:
        log = _last_log(lineage_of(options.recipe).logs)
        record = next((one for one in records if one.log == str(log)), None)
    else:
        record = _chosen(records, options.name)
        log = Path(record.log)
    try:
        with log.open("rb") as file:
            _copy(file)
            if options.follow and record is not None:
                _follow(file, record)
    except (FileNotFoundError, PermissionError) as error:
        raise MissingInput(
            f"{log} cannot be read ({error.strerror}): it was deleted, or is another user's"
        ) from error
    return 0


def _chosen(records: list["ServerRecord"], name: str | None) -> "ServerRecord":
    """The one server meant; raises MissingInput where there is none, or several."""
    found = [one for one in records if name in (None, one.served_name, one.phase)]
    if len(found) == 1:
        return found[0]
    wanted = f"server {name}" if name else "server"
    if not found:
        there = ", ".join(one.served_name for one in records) or "none"
        raise MissingInput(
            f"no {wanted} of ours on this machine (there are: {there}). eagle3 server logs --recipe NAME "
            "shows the log of a recipe's last one."
        )
    names = "\n".join(f"  {one}" for one in found)
    raise MissingInput(f"{len(found)} servers on this machine; name one of them:\n{names}")


def _last_log(folder: Path) -> Path:
    logs = [path for path in folder.glob("*.log") if not path.name.endswith(".watcher.log")]
    if not logs:
        raise MissingInput(f"no log of a server in {folder}: none was started for this recipe yet")
    return max(logs, key=lambda path: path.stat().st_mtime)


def _copy(file: BinaryIO) -> None:
    """What the file has from here on, as it is."""
    shutil.copyfileobj(file, sys.stdout.buffer)
    sys.stdout.flush()


def _follow(file: BinaryIO, record: "ServerRecord") -> None:
    """Copy what comes until the server is gone."""
    while _goes_on(record):
        time.sleep(_POLL_S)
        _copy(file)
    _copy(file)


def _goes_on(record: "ServerRecord") -> bool:
    from eagle3_pipeline.serving.record import read_record

    now = read_record(record.path)  # its process is not in it while it is being started
    return now is not None and now.marker == record.marker and now.state() != "failed"
