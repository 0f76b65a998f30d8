"""The rule on layer ids that holds for every target; extraction/layers.py says what the ids mean."""

from collections.abc import Sequence


def require_rising(ids: Sequence[int]) -> None:
    """Raise ValueError unless the ids rise strictly, without the embedding, with one beside the last."""
    listed = list(ids)
    if listed != sorted(set(listed)) or listed[:1] < [1]:
        raise ValueError(
            f"{listed} must rise strictly and start at 1 or above (0 is the embedding, which the draft has "
            "already)"
        )
    if len(listed) < 2:
        raise ValueError(f"{listed}: at least one layer beside the last must feed the draft")
