"""Near duplicates among texts: exact Jaccard similarity of their 5-word shingles, by an index of prefixes.

Two sets x, y of Jaccard similarity >= t share at least t |x| elements. Sort the elements of every set
by one order; then x and y share an element within the first |x| - ceil(t |x|) + 1 of x and the first
|y| - ceil(t |y|) + 1 of y (the prefix filter of Chaudhuri, Ganti and Kaushik, "A primitive operator for
similarity joins in data cleaning", 2006). Only prefixes are indexed; each candidate is compared exactly.
The order is that of hashes, so it is the same in every process.

Memory: 8 bytes per shingle, and about 150 bytes for each shingle in a prefix (30 % of them at t = 0.7).
"""

import array
import hashlib
import math
import re
from collections.abc import Iterator

_WORDS_IN_SHINGLE = 5
# Scripts written without spaces count each character as a word.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def shingles(text: str) -> frozenset[int]:
    """64-bit hashes of all runs of five words; of the whole text if it has fewer words."""
    words = _WORD.findall(text.lower()) or [text.strip()]
    last = max(1, len(words) - _WORDS_IN_SHINGLE + 1)
    return frozenset(_hash(" ".join(words[start : start + _WORDS_IN_SHINGLE])) for start in range(last))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


class NearDuplicates:
    """An index that finds whether a set of shingles is more similar than `similarity` to one added before."""

    def __init__(self, similarity: float) -> None:
        self._similarity = similarity
        self._names: list[str] = []
        self._sets: list[array.array[int]] = []
        # One posting is kept as an int and several as a list: most shingles occur once.
        self._postings: dict[int, int | list[int]] = {}

    def add(self, name: str, elements: frozenset[int]) -> None:
        """Remember a set under `name`."""
        number = len(self._sets)
        ordered = sorted(elements)
        self._names.append(name)
        self._sets.append(array.array("Q", ordered))
        for element in self._prefix(ordered):
            found = self._postings.setdefault(element, number)
            if isinstance(found, list):
                found.append(number)
            elif found != number:
                self._postings[element] = [found, number]

    def find(self, elements: frozenset[int]) -> tuple[str, float] | None:
        """The first set added that is more similar than the bound, and how similar it is."""
        for number in sorted(self._candidates(elements)):
            other = self._sets[number]
            shared = len(elements.intersection(other))
            similarity = shared / (len(elements) + len(other) - shared)
            if similarity > self._similarity:
                return self._names[number], similarity
        return None

    def _candidates(self, elements: frozenset[int]) -> set[int]:
        found: set[int] = set()
        for element in self._prefix(sorted(elements)):
            numbers = self._postings.get(element, ())
            found.update((numbers,) if isinstance(numbers, int) else numbers)
        return {number for number in found if self._sizes_allow(len(elements), len(self._sets[number]))}

    def _sizes_allow(self, size: int, other: int) -> bool:
        return min(size, other) > self._similarity * max(size, other)

    def _prefix(self, ordered: list[int]) -> Iterator[int]:
        # The tolerance keeps a product such as 0.7 * 10 = 7.000000000000001 from losing an element.
        shared = math.ceil(self._similarity * len(ordered) - 1e-9)
        yield from ordered[: len(ordered) - shared + 1]
