"""Every error that this project raises on purpose, as one tree.

    Eagle3Error
    ├── RecipeError            the recipe is wrong: edit it, nothing was started
    ├── MissingInput           something that should have been made before is not there
    ├── DamagedFile            a file of ours is not what its manifest or format says
    ├── NotEnoughRoom          disk or memory: what is wanted, what is free
    │   └── NotEnoughMemory    memory: other settings may need less
    ├── BadInput               prompts, models or drafts from outside that cannot be used
    ├── SourceUnreachable      the network or the hub failed while something was read or published
    ├── QualityError           a measured share, loss or acceptance is outside its bound
    ├── Busy                   another process works on these GPUs or writes this shard
    └── ServerError            anything about the life of a vLLM server
        ├── ServerRefused      it cannot start like this (flags, port, model): do not retry
        ├── ServerDied         the process ended while it was loading or working
        ├── ServerStopped      a person stopped it while it was in use: do not retry
        ├── ServerStalled      alive, but it makes no tokens, or nobody gets a reply
        ├── RequestsTimedOut   some requests ran over their limit: do not retry, raise the limit
        └── ServerNotReady     alive, but not ready within its time limit: do not retry, raise the limit

A message says what was found, what was expected and what to do. `retryable` is what an
orchestrator asks: would the same step, started again, have a chance?
"""


class Eagle3Error(Exception):
    """Base of all errors raised on purpose."""

    retryable = False


class RecipeError(Eagle3Error, ValueError):
    """The recipe is refused; the message names the place, the reason and the valid values."""


class MissingInput(Eagle3Error):
    """An input that an earlier step makes is not there; the message names that step."""


class DamagedFile(Eagle3Error):
    """A file differs from its manifest or breaks its own format; it is never repaired by guessing."""


class NotEnoughRoom(Eagle3Error):
    """Disk or memory does not suffice; the message has both numbers."""


class NotEnoughMemory(NotEnoughRoom):
    """Memory does not suffice for these settings; others may need less."""


class BadInput(Eagle3Error, ValueError):
    """Data from outside (prompts, model folder, draft) cannot be used as it is."""


class SourceUnreachable(Eagle3Error):
    """The hub could not be reached, or no further; it or the network may be back soon."""

    retryable = True


class QualityError(Eagle3Error):
    """A number that was measured is outside the bound that the recipe sets."""


class Busy(Eagle3Error):
    """Another process holds the lock; the message says on what, and who where that is known."""

    retryable = True


class ServerError(Eagle3Error):
    """Base of what can happen to a vLLM server."""


class ServerRefused(ServerError):
    """The server cannot be started with these settings on this machine."""


class ServerDied(ServerError):
    """The server's process ended; the message carries the last lines of its log."""

    retryable = True


class ServerStopped(ServerError):
    """A person stopped the server while it was in use; starting it again would undo that."""


class ServerStalled(ServerError):
    """The server's process lived, but made no tokens for requests that ran, or gave no reply in time."""

    retryable = True


class RequestsTimedOut(ServerError):
    """Requests ran over their limit while others were answered.

    Another attempt would wait for the same limit again; the message names the setting to raise.
    """


class ServerNotReady(ServerError):
    """The server's process lives, but was not ready within the time limit.

    Another attempt would wait for the same limit again, an hour for a large target; the message names the
    setting to raise.
    """
