"""Prompts that others must not be near to: those of the evaluation sets, and those that judge the draft.

There are few of them, so that an index from shingle to text is small and every comparison is exact.
"""

from collections import Counter
from collections.abc import Sequence

from eagle3_pipeline.prompts.near_duplicates import plain, shingles
from eagle3_pipeline.prompts.parsing import ParsedPrompt, Reason, RowRejected

_HIGHEST_OVERLAP = 0.7
_FEWEST_SHINGLES = 8  # twelve words; less may be a turn of phrase that longer texts share


class HeldOut:
    """Refuses prompts that are similar to a held-out one, have most of it within, or lie within it."""

    def __init__(self, reason: Reason, near_duplicate_similarity: float) -> None:
        """The bound is `near_duplicate_similarity`, but 0.7 at the most: allowed repeats allow no leaks."""
        self._reason: Reason = reason
        self._bound = min(_HIGHEST_OVERLAP, near_duplicate_similarity)
        self._texts: dict[str, str] = {}
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._numbers: dict[int, list[int]] = {}

    def add(self, name: str, turns: Sequence[str]) -> None:
        """Hold the user turns of a conversation out, each by itself; `name` is for people.

        Further turns of less than twelve words are left out: many conversations share them ("Go on.").
        """
        for number, turn in enumerate(turns):
            elements = shingles(turn)
            if number and len(elements) < _FEWEST_SHINGLES:
                continue
            self._texts.setdefault(plain(turn), name)
            for element in elements:
                self._numbers.setdefault(element, []).append(len(self._names))
            self._names.append(name)
            self._sizes.append(len(elements))

    def check(self, parsed: ParsedPrompt, sets: Sequence[frozenset[int]]) -> None:
        """Raise RowRejected for a prompt that is near; `sets` are the shingles of its turns."""
        for turn, elements in zip(parsed.turns, sets, strict=True):
            if (name := self._texts.get(plain(turn))) is not None:
                raise RowRejected(self._reason, f"same as {name}")
            for number, shared in self._shared(elements).items():
                similarity = shared / (len(elements) + self._sizes[number] - shared)
                if similarity > self._bound:
                    raise RowRejected(self._reason, f"similarity {similarity:.2f} to {self._names[number]}")
                share = shared / len(elements)
                if share > self._bound and len(elements) >= _FEWEST_SHINGLES:
                    raise RowRejected(self._reason, f"{share:.0%} of a turn are in {self._names[number]}")
        everything = shingles(parsed.system or "").union(*sets)
        for number, shared in self._shared(everything).items():
            share = shared / self._sizes[number]
            if share > self._bound and self._sizes[number] >= _FEWEST_SHINGLES:
                raise RowRejected(self._reason, f"holds {share:.0%} of {self._names[number]}")

    def _shared(self, elements: frozenset[int]) -> Counter[int]:
        """How many of these shingles each held-out text has."""
        return Counter(number for element in elements for number in self._numbers.get(element, ()))
