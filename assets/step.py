"""What every step does around its one call of the library: it ends with its run, and fails in plain words."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from eagle3_pipeline.at_work import at_work
from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.parent_death import interrupt_with_parent

# A server that died, a lease that somebody holds, a hub that is out of reach deserve another attempt; step()
# forbids it for all else.
RETRIES = dg.RetryPolicy(max_retries=2, delay=10)


class Cancelled(dg.DagsterExecutionInterruptedError, dg.DagsterError):
    """The run was cancelled. Being Dagster's own error too, it is not held against a retry policy.

    A bare interruption is: Dagster would put the step of a cancelled run up for another attempt.
    """


@contextmanager
def step(lineage: Lineage) -> Iterator[None]:
    """Say that the recipe is worked on, and turn what is raised into a failure of the step.

    It is retried only where another attempt could help.
    An error of ours is shown with its own message. Any other exception is a bug: it would only
    happen again. A cancelled step is never retried.
    """
    _end_with_run()
    try:
        with at_work(lineage.folder):
            yield
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError) as interruption:
        raise Cancelled("The run was cancelled. What is complete is kept.") from interruption
    except Eagle3Error as error:
        raise dg.Failure(f"{type(error).__name__}: {error}", allow_retries=error.retryable) from error
    except Exception as error:
        raise dg.Failure(f"{type(error).__name__}: {error}", allow_retries=False) from error


def _end_with_run() -> None:
    """Let the kernel end this step's process when the run that started it is killed.

    Otherwise a step would work on, with its lease and its journals locked, while the next run waits for
    it. Only where the run has started the step as a child of its own: a run itself outlives a restart
    of the daemon.
    """
    if multiprocessing.parent_process() is not None:
        interrupt_with_parent()
