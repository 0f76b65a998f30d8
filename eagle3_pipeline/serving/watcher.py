"""Stops a server that nobody uses: `python -m eagle3_pipeline.serving.watcher RECORD`, one per server.

It is started with the server, in a session of its own, so that a server ends in time without any daemon,
whatever became of the step that started it. It ends when the server ends, after ending what that left
behind. A watcher that was killed is started again by the next step that uses the server.
"""

import logging
import sys
import time
from pathlib import Path

from eagle3_pipeline.errors import ServerError
from eagle3_pipeline.serving.lease import last_used, try_hold
from eagle3_pipeline.serving.record import ServerRecord, read_record
from eagle3_pipeline.serving.stopping import stop_server

logger = logging.getLogger(__name__)


def watch(path: Path) -> None:
    """Watch the server of a record until it is gone or was stopped here for being idle."""
    first = read_record(path)
    if first is None:
        return
    used = time.time()
    while True:
        time.sleep(min(5.0, max(0.2, first.idle_timeout_s / 5)))
        record = read_record(path)
        if record is None or record.marker != first.marker:
            return
        if not record.alive():
            logger.info("%s ended; ending what it left behind", record)
            stop_server(record)
            return
        used = max(used, last_used(record.gpus))
        if time.time() - used >= record.idle_timeout_s and _stop_if_idle(record):
            return


def _stop_if_idle(record: ServerRecord) -> bool:
    with try_hold(record.gpus, f"stopping idle {record.served_name}") as free:
        if not free:
            return False
        logger.info("%s was idle for %.0f s", record, record.idle_timeout_s)
        try:
            stop_server(record)
        except ServerError as error:
            logger.error("%s", error)
        return True


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s watcher: %(message)s")
    watch(Path(sys.argv[1]))
