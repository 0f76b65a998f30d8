"""Rows of several weighted sources in one order, in which each source has its share of the kept prompts.

The next row comes from the source with the smallest kept / weight, the first of the recipe among equals;
a source at its end drops out, and a rejected row counts for nobody. So what comes next depends on the
verdicts so far and never on how many prompts are wanted: fewer prompts are a prefix of more.

    weights 2, 1     a a? b a a b ...     (a?: this row of a was rejected, so a is asked again)
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eagle3_pipeline.prompts.hub_dataset import name_of, pin, stream_dataset
from eagle3_pipeline.prompts.sources import Row, read_file
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.recipe.prompts import PromptSource


@dataclass
class Strand:
    """One source: its rows in an order of their own, and how many were taken and kept so far."""

    name: str
    weight: float
    rows: Iterator[Row]
    taken: int = 0
    kept: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        """What the manifest says about the source."""
        return {"source": self.name, "weight": self.weight, "rows": self.taken, "kept": self.kept}


class Mixture:
    """Iterates over the rows of all strands. Say `keep()` after each row that was kept."""

    def __init__(self, strands: list[Strand]) -> None:
        self.strands = strands
        self._last: Strand | None = None

    def __iter__(self) -> Iterator[Row]:
        going = list(self.strands)
        while going:
            strand = min(going, key=lambda one: one.kept / one.weight)
            row = next(strand.rows, None)
            if row is None:
                going.remove(strand)
                continue
            strand.taken += 1
            self._last = strand
            yield row

    def keep(self) -> None:
        """The row that came last gave a prompt."""
        assert self._last is not None
        self._last.kept += 1


def mix_sources(recipe: Recipe, revisions: dict[str, str]) -> Mixture:
    """The sources of a recipe, each in an order fixed by seed and content; `revisions` has commits by pin."""
    seed = recipe.prompts.seed
    strands = []
    for index, source in enumerate(recipe.prompts.sources):
        if source.path is not None:
            rows = _shuffle_file(source, index, seed)
        else:
            rows = stream_dataset(source, revisions[pin(source)], seed)
        strands.append(Strand(name_of(source), source.weight, rows))
    return Mixture(strands)


def _shuffle_file(source: PromptSource, index: int, seed: int) -> Iterator[Row]:
    """Rows of a local source, sorted by a hash of seed, the source's place in the recipe and row number."""
    assert source.path is not None
    rows = read_file(source.path, source.column)
    rows.sort(key=lambda row: hashlib.sha256(f"{seed} {index} {row.number}".encode()).digest())
    yield from rows
