"""What the doctor puts right where it is asked to: this user's leftovers of servers that are gone.

A server that lives, or that may live in another container, is never touched; neither is shared memory, which
a container beside this one may have mapped unseen.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial

from eagle3_pipeline.doctor.finding import Finding, ok, problem
from eagle3_pipeline.doctor.leftovers import dead_records, elsewhere_recorded, folders_left, unrecorded
from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.serving.process import end_family
from eagle3_pipeline.serving.server import stop_if_unused


def repair() -> Iterator[Finding]:
    """A line for each thing that was put right or could not be, or one that there was nothing."""
    found = [*_records(), *_processes(), *_folders()]
    yield from found or [ok("nothing of a server that is gone is left")]


def _records() -> Iterator[Finding]:
    for record in dead_records():
        if record.uid == os.getuid():
            what = f"{record} was dead: its processes are ended, it is forgotten"
            yield _tried(what, partial(stop_if_unused, record))


def _processes() -> Iterator[Finding]:
    for marker, members in unrecorded().items():
        if not elsewhere_recorded(members):
            what = f"processes {', '.join(map(str, members))} of a server without a record are ended"
            yield _tried(what, partial(end_family, None, marker))


def _folders() -> Iterator[Finding]:
    for folder in folders_left():
        yield _tried(f"{folder} of a server that is gone is removed", partial(shutil.rmtree, folder))


def _tried(what: str, act: Callable[[], object]) -> Finding:
    try:
        act()
    except (Eagle3Error, OSError) as error:
        return problem(f"not done: {what}", f"{type(error).__name__}: {error}")
    return ok(what)
