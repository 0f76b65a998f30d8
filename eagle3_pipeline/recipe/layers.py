"""Layer ids as a recipe has them; extraction/layers.py says what they mean."""

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


def from_output_of_layer(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids as SGLang and SpecForge count them (output of layer k) to ids as they are counted here."""
    return tuple(layer + 1 for layer in ids)


def to_output_of_layer(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids as they are counted here to ids as SGLang and SpecForge count them (output of layer k)."""
    return tuple(layer - 1 for layer in ids)
