"""Near duplicates among texts: Jaccard similarity of their 5-word shingles, by MinHash and an exact check.

The minimum of a random hash over two sets is the same with a probability equal to their Jaccard
similarity s (Broder, "On the resemblance and containment of documents", 1997). 128 such minima are cut
into b bands of r; sets that agree in a whole band are candidates. A pair escapes with probability
(1 - s^r)^b; r is the largest for which that is below 1 in 1,000 for pairs right at the bound. At a bound of
0.7 r is 4, and text that many prompts share, an instruction above each of them for example, makes
candidates of a quarter of the pairs with a similarity of 0.3. So the candidates are sorted out by the
share of minima in which they agree, all at once, and the few that may be above the bound are compared
exactly: nothing is dropped by chance.

Memory of a set: 8 bytes per shingle, 512 bytes of minima, and about 110 bytes per band (32 bands at a
bound of 0.7).
"""

import array
import hashlib
import math
import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

_WORDS_IN_SHINGLE = 5
# Scripts written without spaces count each character as a word.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")

_MINIMA = 128
_HIGHEST_MISS = 1e-3
_HIGHEST_MISJUDGED = 3e-5  # the lower tail of a normal distribution at 4 sigma


@cache
def _random_hashes() -> "tuple[numpy.ndarray, numpy.ndarray]":
    """Factors (odd) and summands of 128 hash functions, each [128, 1]; always the same ones."""
    import numpy  # here, because the code location imports this file when it loads

    random = numpy.random.Generator(numpy.random.PCG64(5))
    factors, summands = random.integers(1 << 63, size=(2, _MINIMA, 1), dtype=numpy.uint64)
    return factors * numpy.uint64(2) + numpy.uint64(1), summands


def shingles(text: str) -> frozenset[int]:
    """64-bit hashes of all runs of five words; of the whole text if it has fewer words."""
    words = _WORD.findall(text.lower()) or [text.strip()]
    last = max(1, len(words) - _WORDS_IN_SHINGLE + 1)
    return frozenset(_hash(" ".join(words[start : start + _WORDS_IN_SHINGLE])) for start in range(last))


def plain(text: str) -> str:
    """The text whatever its case and white space."""
    return " ".join(text.casefold().split())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


class NearDuplicates:
    """An index that finds whether a set of shingles is more similar than `similarity` to one added before."""

    def __init__(self, similarity: float) -> None:
        self._similarity = similarity
        self._rows = _rows_per_band(similarity)
        self._names: list[str] = []
        self._sets: list[array.array[int]] = []
        self._fewest_agreeing = _fewest_agreeing(similarity)
        self._minima = bytearray()  # [sets, 128] uint32, the low halves
        # One set in a band is kept as an int and several as a list: most bands hold one.
        self._bands: dict[int, int | list[int]] = {}

    def add(self, name: str, elements: frozenset[int]) -> None:
        """Remember a set, which must not be empty, under `name`."""
        number = len(self._sets)
        self._names.append(name)
        self._sets.append(array.array("Q", sorted(elements)))
        minima = _minima_of(elements)
        self._minima += minima.astype("uint32").tobytes()
        for band in self._bands_of(minima):
            found = self._bands.setdefault(band, number)
            if isinstance(found, list):
                found.append(number)
            elif found != number:
                self._bands[band] = [found, number]

    def find(self, elements: frozenset[int]) -> tuple[str, float] | None:
        """The first set added that is more similar than the bound, and how similar it is."""
        minima = _minima_of(elements)
        candidates: set[int] = set()
        for band in self._bands_of(minima):
            found = self._bands.get(band, ())
            candidates.update((found,) if isinstance(found, int) else found)
        for number in self._likely(sorted(candidates), minima):
            other = self._sets[number]
            shared = len(elements.intersection(other))
            similarity = shared / (len(elements) + len(other) - shared)
            if similarity > self._similarity:
                return self._names[number], similarity
        return None

    def _likely(self, candidates: list[int], minima: "numpy.ndarray") -> list[int]:
        """Those of the candidates, which are sorted, that may be above the bound."""
        import numpy

        if not candidates:
            return []
        theirs = numpy.frombuffer(self._minima, dtype=numpy.uint32).reshape(-1, _MINIMA)[candidates]
        agreeing = (theirs == minima.astype(numpy.uint32)).sum(axis=1)
        likely: list[int] = numpy.array(candidates)[agreeing >= self._fewest_agreeing].tolist()
        return likely

    def _bands_of(self, minima: "numpy.ndarray") -> list[int]:
        """A hash per band. Arithmetic is modulo 2^64; the high bits of a product are the mixed ones."""
        import numpy

        factors, _ = _random_hashes()
        bands = minima[: _MINIMA // self._rows * self._rows].reshape(-1, self._rows)
        mixed = (bands * factors[: self._rows, 0]).sum(axis=1, dtype=numpy.uint64)
        mixed += numpy.arange(len(bands), dtype=numpy.uint64)  # equal minima in two bands are two keys
        keys: list[int] = mixed.tolist()
        return keys


def _minima_of(elements: frozenset[int]) -> "numpy.ndarray":
    """The minimum of each hash function over the elements: [128] uint64."""
    import numpy

    factors, summands = _random_hashes()
    values = numpy.fromiter(elements, dtype=numpy.uint64, count=len(elements))
    minima: numpy.ndarray = (factors * values + summands).min(axis=1)
    return minima


def _fewest_agreeing(similarity: float) -> int:
    """In how many of 128 minima two sets at the bound agree at least, but for a chance that is negligible."""
    tail = 0.0
    for agreeing in range(_MINIMA):
        chance = similarity**agreeing * (1 - similarity) ** (_MINIMA - agreeing)
        tail += math.comb(_MINIMA, agreeing) * chance
        if tail > _HIGHEST_MISJUDGED:
            return agreeing
    return _MINIMA


def _rows_per_band(similarity: float) -> int:
    rows = 1
    while rows < _MINIMA and _miss(similarity, rows + 1) < _HIGHEST_MISS:
        rows += 1
    return rows


def _miss(similarity: float, rows: int) -> float:
    return float((1 - similarity**rows) ** (_MINIMA // rows))
