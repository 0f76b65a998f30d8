"""The processes that train together: one alone, or those that torchrun started, one for each GPU.

All go through the same steps, each with batches of its own, and torch's DistributedDataParallel sums their
gradients. Numbers and objects travel over gloo, from the CPU, and gradients of GPUs over nccl. Whoever waits
for one that died is told by the closed connection, or ended by torchrun.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Of one collective: the first process validates, or copies the states that judge, while the others wait.
_LIMIT = timedelta(hours=4)

T = TypeVar("T")


class Group:
    """This process among those that train together."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes, validates and tells."""
        return self.rank == 0

    def mine(self, step: Sequence[T]) -> Sequence[T]:
        """This process's share of what a step goes through; the first of all where nothing is left for it."""
        return step[self.rank :: self.size] or step[:1]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes, in float64."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        result: list[float] = tensor.tolist()
        return result

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def share(self, value: T) -> T:
        """The first process's value, for all. Until it comes the others wait."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0)
        result: T = values[0]
        return result

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """The body runs in the first process, then in all others: what it makes is there for them."""
        if not self.is_first:
            self.share(None)
        yield
        if self.is_first:
            self.share(None)

    def synchronized(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with gradients that are the mean over the processes."""
        if self.size == 1:
            return module
        # There are no unused parameters. But without the search for them, or with a static graph, DDP deals
        # the gradients out into other buckets after its first step. With more than two processes sums are
        # then taken in another order, and a training that goes on does not end with the bits of one that was
        # never stopped.
        return DistributedDataParallel(module, find_unused_parameters=True, gradient_as_bucket_view=True)


def unsynchronized(module: torch.nn.Module) -> AbstractContextManager[None]:
    """A context whose backward passes leave the gradients of `module` in this process."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


@contextmanager
def join(processes: int, on_gpus: bool) -> Iterator[Group]:
    """Meet the other processes that torchrun started; alone where there is one. All leave together.

    The process must then end by os._exit. The group is never taken down: its destructor waits for gloo's
    threads with the interpreter's lock in hand, and one of them may want that lock to drop its last tensor.
    """
    if processes == 1:
        yield Group()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout=_LIMIT)
    group = Group(dist.get_rank(), dist.get_world_size())
    yield group
    group.share(None)  # what the first one writes at last is written
