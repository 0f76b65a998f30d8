"""How many bytes the hidden states of the samples will take, and whether they will fit.

A sample counts with its first `max_sample_tokens` tokens; one whose whole completion is cut away by
that trains nothing and counts with none.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.shards.format import bytes_of_states


@dataclass(frozen=True)
class ShardLengths:
    """One shard: tokens of (prompt, prompt + completion) of each sample that trains."""

    shard: str
    lengths: list[tuple[int, int]]
    is_extracted: bool
    """Its states are on the disk already."""

    def tokens(self, longest: int) -> int:
        """Tokens to extract when samples are cut to `longest`."""
        return sum(min(total, longest) for prompt, total in self.lengths if prompt < min(total, longest))


@dataclass(frozen=True)
class BytePlan:
    """The extraction of a run, in tokens and bytes."""

    shards: list[ShardLengths]
    longest: int
    layers: int
    hidden_size: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the states of one token."""
        return bytes_of_states(1, self.layers, self.hidden_size)

    @property
    def tokens(self) -> int:
        """Tokens to extract in all."""
        return sum(one.tokens(self.longest) for one in self.shards)

    def missing_bytes(self, longest: int | None = None, shards: int | None = None) -> int:
        """Bytes still to be written; or what they would be with another cut or fewer shards."""
        missing = [
            one.tokens(longest or self.longest) for one in self.shards[:shards] if not one.is_extracted
        ]
        return sum(missing) * self.bytes_per_token

    def numbers(self) -> dict[str, int]:
        """The plan as facts: samples and tokens that train, cut samples, bytes in all."""
        lengths = [length for one in self.shards for length in one.lengths]
        return {
            "trained_samples": sum(prompt < min(total, self.longest) for prompt, total in lengths),
            "cut_samples": sum(total > self.longest for _, total in lengths),
            "trained_tokens": self.tokens,
            "bytes_per_token": self.bytes_per_token,
            "bytes_of_states": self.tokens * self.bytes_per_token,
        }


def require_room(lineage: Lineage, plan: BytePlan) -> None:
    """Raise NotEnoughRoom, with choices, unless the missing states fit on the disk and in the budget."""
    missing = plan.missing_bytes()
    free = shutil.disk_usage(lineage.folder).free
    limits = {f"{_gib(free)} are free on the disk of {lineage.folder}": free}
    budget = lineage.recipe.storage.max_gib
    if budget is not None:
        used = _bytes_below(lineage.folder)
        left = int(budget * 2**30) - used
        limits[f"storage.max_gib = {budget:g} leaves {_gib(left)} ({_gib(used)} are used)"] = left
    why, room = min(limits.items(), key=lambda limit: limit[1])
    if missing > room:
        raise NotEnoughRoom(
            f"the hidden states of {plan.tokens} tokens ({plan.bytes_per_token} bytes each) still take "
            f"{_gib(missing)}, but {why}. Choices: {'; '.join(_choices(plan, room, budget))}."
        )


def _choices(plan: BytePlan, room: int, budget: float | None) -> list[str]:
    choices = []
    shards = max(n for n in range(len(plan.shards) + 1) if plan.missing_bytes(shards=n) <= room)
    if shards:
        choices.append(f"run.shards: {shards} of {len(plan.shards)}")
    if (longest := _longest_that_fits(plan, room)) > 0:
        choices.append(f"extraction.max_sample_tokens: {longest} (is {plan.longest})")
    layers = plan.layers * max(room, 0) // max(plan.missing_bytes(), 1)
    if layers >= 2:
        choices.append(f"{layers} extraction.layers (are {plan.layers})")
    enlarge = "raise storage.max_gib, " if budget is not None else ""
    choices.append(f"{enlarge}free space or point EAGLE3_STORAGE to a larger disk")
    return choices


def _longest_that_fits(plan: BytePlan, room: int) -> int:
    """The largest max_sample_tokens whose states fit, 0 where none that keeps any sample does."""
    low, high = 0, plan.longest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plan.missing_bytes(longest=middle) <= room else (low, middle - 1)
    return low if low and any(one.tokens(low) for one in plan.shards) else 0


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except FileNotFoundError:
                continue  # another process moved it meanwhile
    return total


def _gib(count: int) -> str:
    value = count / 2**30
    return f"{value:.2f} GiB" if abs(value) < 10 else f"{value:.0f} GiB"
