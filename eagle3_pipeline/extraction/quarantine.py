"""How many samples with unusable states are borne: in one shard, and in all shards of a call together."""

from dataclasses import dataclass


@dataclass
class Quarantine:
    """Samples that were left out, of those that were planned so far.

    A single one is always borne, or a small shard could never be made. Many small shards would lose one each,
    so what they share counts over all of them.
    """

    max_share: float
    planned: int = 0
    left_out: int = 0

    @property
    def is_exceeded(self) -> bool:
        """Whether more were left out than `max_share` of the planned ones, and more than one."""
        return self.left_out > max(1.0, self.max_share * self.planned)
