"""How the shards of a run are split into waves that fit the disk, one after the other.

A wave is a contiguous run of shards: its states are extracted, trained on and deleted before those of
the next one are written. On the disk at the same time lie one wave and a copy of the validation samples,
which is kept throughout. All at once is one wave, and nothing is deleted.

    shards   s0 s1 s2 s3 s4 s5 s6          3 waves: [s0 s1 s2] [s3 s4] [s5 s6]

Among all ways to make so many waves, the one is taken whose largest wave is smallest. The first wave goes
on to the first shard of which a sample trains: there is no training without any.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from eagle3_pipeline.samples.byte_plan import BytePlan


@dataclass(frozen=True)
class WavePlan:
    """The waves by the names of their shards, and the bytes that the fullest moment takes."""

    waves: list[list[str]]
    needed: int


def plan_waves(plan: BytePlan, waves: int | str, room: int) -> WavePlan:
    """So many waves as `waves` says, at most one per shard; for `auto` the fewest that fit into `room` bytes.

    A plan that does not fit is returned all the same: where `auto` finds none, the one with the most waves.
    """
    most = len(plan.shards) - _shards_ahead(plan)
    # With fewer waves than this, one of them has more bytes than there are.
    fewest = min(max(1, -(-sum(plan.missing) // max(room, 1))), most)
    counts = range(fewest, most + 1) if waves == "auto" else [min(int(waves), most)]
    for count in counts:
        found = _cut(plan, count)
        if found.needed <= room:
            break
    return found


def split(sizes: Sequence[int], count: int) -> list[range]:
    """`count` contiguous ranges over all of `sizes`, none empty, so that the largest sum is smallest."""
    low, high = max(sizes), max(sum(sizes), 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fill(sizes, middle) <= count else (middle + 1, high)
    return list(_ranges(sizes, count, low))


def _cut(plan: BytePlan, count: int) -> WavePlan:
    names = [one.shard for one in plan.shards]
    if count == 1:
        return WavePlan([names], plan.at_once)
    # By the bytes of whole shards: what lies on the disk at this moment must not move a border.
    ahead = _shards_ahead(plan)
    together = [sum(plan.sizes[: ahead + 1]), *plan.sizes[ahead + 1 :]]
    found = split(together, count)
    ranges = [range(one.start + ahead if one.start else 0, one.stop + ahead) for one in found]
    largest = max(sum(plan.missing[number] for number in one) for one in ranges)
    return WavePlan([[names[number] for number in one] for one in ranges], largest + plan.validation_bytes)


def _shards_ahead(plan: BytePlan) -> int:
    """Shards before the first one of which a sample trains; all but the last where none does."""
    return next((number for number, samples in enumerate(plan.training) if samples), len(plan.shards) - 1)


def _fill(sizes: Sequence[int], most: int) -> int:
    """How many ranges it takes when each is filled up to `most`."""
    count, room = 0, -1
    for size in sizes:
        if size > room:
            count, room = count + 1, most
        room -= size
    return count


def _ranges(sizes: Sequence[int], count: int, most: int) -> Iterator[range]:
    """Ranges filled up to `most`, or cut short so that one of `sizes` is left for each of the others."""
    starts, room = [0], most
    for number, size in enumerate(sizes):
        if number and (size > room or len(sizes) - number <= count - len(starts)):
            starts.append(number)
            room = most
        room -= size
    yield from (range(first, end) for first, end in pairwise([*starts, len(sizes)]))
