"""Stops a server that nobody uses: `python -m eagle3_pipeline.serving.watcher RECORD`, one per server.

It is started just before the server, in a session of its own, so that a server ends in time without any
daemon, whatever became of the step that started it. It ends when the server ends, after ending what that
left behind. A watcher that was killed is started again by the next step that uses the server.
"""

import logging
import sys
import time
from pathlib import Path

from eagle3_pipeline.serving.lease import last_used, note_use, try_hold
from eagle3_pipeline.serving.readiness import death_of
from eagle3_pipeline.serving.record import ServerRecord, read_record
from eagle3_pipeline.serving.stopping import stop_server

logger = logging.getLogger(__name__)

_AGAIN_S = 60.0


def stops_at(record: ServerRecord) -> float:
    """When the server of a record is stopped if nobody uses it from now on, in seconds since the epoch."""
    return max(record.started_at, last_used(record.gpus)) + record.idle_timeout_s


def watch(path: Path) -> None:
    """Watch the server of a record until it is gone or was stopped here for being idle."""
    first = read_record(path)
    if first is None:
        return
    while True:
        time.sleep(min(5.0, max(0.2, first.idle_timeout_s / 5)))
        try:
            if _look(path, first):
                return
        except Exception as error:  # whatever it is: without a watcher the server would stay for ever
            logger.error("%s: %s. Looking again in %.0f s", type(error).__name__, error, _AGAIN_S)
            time.sleep(_AGAIN_S)


def _look(path: Path, first: ServerRecord) -> bool:
    """Look once and do what is due; whether there is nothing to watch any more."""
    # In this order: a starter that is dead before the record is read has written all that it ever will.
    starter_lives = first.starter.alive()
    record = read_record(path)
    if record is None or record.marker != first.marker:
        return True
    note_use(record.gpus)
    if record.process is None and starter_lives:
        return False
    if record.stage == "failed":
        stop_server(record, death_of(record))  # whoever said so may have been killed over ending it
        return True
    if not record.alive():
        logger.info("%s ended, or its start was cut short; ending what is left", record)
        stop_server(record, death_of(record) if record.process else None)
        return True
    due = record.stage in ("draining", "stopping") or time.time() >= stops_at(record)
    return due and _stop_if_idle(record)


def _stop_if_idle(record: ServerRecord) -> bool:
    with try_hold(record.gpus, f"stopping idle {record.served_name}") as free:
        if free:
            why = f"idle for {record.idle_timeout_s:.0f} s" if record.stage == "ready" else record.stage
            logger.info("%s was %s", record, why)
            stop_server(record)
        return free


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s watcher: %(message)s")
    watch(Path(sys.argv[1]))
