"""Whether a server is ready: its own process lives, it is healthy, and it serves under our name.

All three, because anything may answer on a port: a server of another model that was there before, or a
proxy. The served name carries the fingerprint, so only the right server can show it.
"""

import logging
import time
from pathlib import Path

import httpx

from eagle3_pipeline.errors import ServerError, ServerNotReady, ServerStalled, ServerStopped
from eagle3_pipeline.serving.diagnosis import explain_death, news
from eagle3_pipeline.serving.process import exit_status
from eagle3_pipeline.serving.record import ServerRecord, read_record

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_NEWS_EVERY_S = 10.0
_SAME_NEWS_EVERY_S = 30.0
_TIMEOUT = httpx.Timeout(5.0, connect=1.0)
# Ends that were made by us: the log has nothing of them.
_TOLD: dict[str, type[ServerError]] = {kind.__name__: kind for kind in (ServerStalled, ServerStopped)}


def wait_until_ready(record: ServerRecord, limit_s: float, knob: str) -> None:
    """Return when the server is ready; `knob` names the setting that raises the limit.

    Raises ServerDied or ServerRefused within a second of the process's end, ServerNotReady after `limit_s`.
    """
    began = time.monotonic()
    progress = _Progress(Path(record.log), limit_s)
    # No proxy of the environment may stand between us and the loopback address.
    with httpx.Client(timeout=_TIMEOUT, trust_env=False) as client:
        while True:
            check_alive(record)
            state = _ask(client, record)
            waited = time.monotonic() - began
            if state is None:
                if not record.ready:
                    logger.info("%s is ready after %.0f s", record, waited)
                return
            if waited >= limit_s:
                advice = "It was ready before, so it hangs." if record.ready else _advice(knob)
                raise ServerNotReady(
                    f"{record} is alive but not ready after {waited:.0f} s: {state}.\n"
                    f"Last news in {record.log}: {news(Path(record.log))}\n{advice}"
                )
            progress.tell(waited)
            time.sleep(_POLL_S)


def _advice(knob: str) -> str:
    return f"If it only loads slowly, raise {knob}. With the same limit another try would end like this."


class _Progress:
    """Tells how the loading goes: at once when the log has news (at most every 10 s), else every 30 s."""

    def __init__(self, log: Path, limit_s: float) -> None:
        self._log = log
        self._limit_s = limit_s
        self._looked_s = self._told_s = 0.0
        self._told = ""

    def tell(self, waited_s: float) -> None:
        """Called often, with the seconds waited so far."""
        if waited_s - self._looked_s < _NEWS_EVERY_S:
            return
        self._looked_s = waited_s
        line = news(self._log)
        if line == self._told and waited_s - self._told_s < _SAME_NEWS_EVERY_S:
            return
        self._told, self._told_s = line, waited_s
        logger.info("loading for %.0f of at most %.0f s: %s", waited_s, self._limit_s, line)


def check_alive(record: ServerRecord) -> None:
    """Raise ServerDied (ServerRefused while loading, for its configuration) if the server's process ended."""
    if not record.alive():
        raise death_of(record)


def death_of(record: ServerRecord) -> ServerError:
    """The error for a server whose process ended: what its record says of it, else what its log shows."""
    now = read_record(record.path)
    if now is not None and now.marker == record.marker and now.failure in _TOLD:
        return _TOLD[now.failure](now.reason)
    ended = exit_status(record.process) if record.process else None
    return explain_death(str(record), Path(record.log), ended, loading=not record.ready)


def _ask(client: httpx.Client, record: ServerRecord) -> str | None:
    """What is missing, in words; None when the server is ready."""
    try:
        health = client.get(f"{record.base_url}/health")
        if health.status_code != 200:
            return f"/health answers {health.status_code}"
        models = client.get(f"{record.base_url}/v1/models")
        names = [str(model["id"]) for model in models.json()["data"]]
    except httpx.TransportError as error:
        return f"no answer on port {record.port} ({type(error).__name__})"
    except (ValueError, KeyError, TypeError):
        return f"port {record.port} answers /v1/models, but not as vLLM does"
    if record.served_name not in names:
        return f"port {record.port} serves {names}, not {record.served_name}: somebody else's server"
    return None
