"""The prompts of the evaluation sets, and whether a training prompt is near to one of them.

There are few of them, so that an index from shingle to prompt is small and every comparison is exact.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from eagle3_pipeline.prompts.near_duplicates import plain, shingles
from eagle3_pipeline.prompts.parsing import ParsedPrompt, RowRejected
from eagle3_pipeline.prompts.prompt import Prompt

_HIGHEST_OVERLAP = 0.7
_FEWEST_SHINGLES = 8  # twelve words; less may be a turn of phrase that longer texts share


class HeldOut:
    """Refuses training prompts that are similar to a held-out one or have most of it within."""

    def __init__(self, prompts: Iterable[Prompt], near_duplicate_similarity: float) -> None:
        """The bound is `near_duplicate_similarity`, but 0.7 at the most: allowed repeats allow no leaks."""
        self._bound = min(_HIGHEST_OVERLAP, near_duplicate_similarity)
        self._texts: dict[str, str] = {}
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._numbers: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            first = prompt.turns[0]  # the one that the evaluation sends
            elements = shingles(first)
            self._texts.setdefault(plain(first), prompt.source)
            self._names.append(prompt.source)
            self._sizes.append(len(elements))
            for element in elements:
                self._numbers.setdefault(element, []).append(number)

    def check(self, parsed: ParsedPrompt, sets: Sequence[frozenset[int]]) -> None:
        """Raise RowRejected for a prompt that is near; `sets` are the shingles of its turns."""
        for turn, elements in zip(parsed.turns, sets, strict=True):
            if (name := self._texts.get(plain(turn))) is not None:
                raise RowRejected("near_evaluation", f"same as one of {name}")
            for number, shared in self._shared(elements).items():
                similarity = shared / (len(elements) + self._sizes[number] - shared)
                if similarity > self._bound:
                    raise RowRejected(
                        "near_evaluation", f"similarity {similarity:.2f} to one of {self._names[number]}"
                    )
        everything = shingles(parsed.system or "").union(*sets)
        for number, shared in self._shared(everything).items():
            share = shared / self._sizes[number]
            if share > self._bound and self._sizes[number] >= _FEWEST_SHINGLES:
                raise RowRejected("near_evaluation", f"holds {share:.0%} of one of {self._names[number]}")

    def _shared(self, elements: frozenset[int]) -> Counter[int]:
        """How many of these shingles each held-out prompt has."""
        return Counter(number for element in elements for number in self._numbers.get(element, ()))
