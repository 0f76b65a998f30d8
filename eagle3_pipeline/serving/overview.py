"""Which servers run and who holds which GPUs, in words: for the command line, the doctor and the web UI."""

import time
from collections.abc import Iterable

from eagle3_pipeline.duration import in_words
from eagle3_pipeline.serving.holders import Holder
from eagle3_pipeline.serving.lease import all_holders, holders
from eagle3_pipeline.serving.record import ServerRecord, all_records
from eagle3_pipeline.serving.watcher import stops_at

NO_SERVER = "no server of ours runs on this machine"


def overview() -> str:
    """All servers, then all leases that are held."""
    return "\n".join([*(servers_in_words() or [NO_SERVER]), *leases_in_words(all_holders())])


def servers_in_words() -> list[str]:
    """A text per server of this machine: what it is, who uses it, when it stops."""
    return [_server_in_words(record) for record in all_records()]


def leases_in_words(found: Iterable[Holder]) -> list[str]:
    """A line per lease: who of these holders holds it, for what, since when."""
    by_lease: dict[str, list[Holder]] = {}
    for holder in found:
        by_lease.setdefault(holder.lease, []).append(holder)
    return [f"{lease} is held by {_names(by_lease[lease])}" for lease in sorted(by_lease)]


def users_in_words(record: ServerRecord) -> str:
    """Who holds the leases of a server's GPUs; empty when nobody does."""
    return _names(holders(record.gpus))


def _server_in_words(record: ServerRecord) -> str:
    state = record.state()
    lines = [f"{record}: {state}, started {_clock(record.started_at)}"]
    if state == "failed":
        lines += [record.reason.partition("\n")[0] or "its processes are gone"]
        lines += ["forgotten when its GPUs are used again, or by eagle3 server stop"]
    elif users := users_in_words(record):
        when = "with" if state == "draining" else f"{in_words(record.idle_timeout_s)} after"
        lines += [f"used by {users}", f"stops by itself {when} its last use"]
    else:
        when = _clock(stops_at(record))
        lines += [f"stops by itself at {when} unless it is used before, or by eagle3 server stop"]
    return "\n    ".join(lines)


def _names(users: Iterable[Holder]) -> str:
    """Each user once, however many GPUs it holds."""
    words = {}
    for one in users:
        where = "" if one.here else " of another container"
        words[one.pid, one.here, one.purpose] = (
            f"{one.purpose} (pid {one.pid}{where}, since {_clock(one.since)})"
        )
    return ", ".join(words.values())


def _clock(seconds: float) -> str:
    """The time of day, with the date unless it is today."""
    then = time.localtime(seconds)
    today = time.strftime("%F") == time.strftime("%F", then)
    return time.strftime("%T" if today else "%F %T", then)
