"""The scale of each layer's states: what it is called in a table of layers, and read from a shard's facts."""

from collections.abc import Mapping
from typing import Any


def scale_name(layer: int) -> str:
    """What a table of layers calls the natural logarithm of the RMS of a layer's states."""
    return f"the log scale of layer {layer}"


def scales_of(facts: Mapping[str, Any]) -> dict[int, float]:
    """The log scale of each layer, from the facts of a shard; empty where too few samples were measured."""
    table = facts["layer_table"]
    return {layer: table[name] for layer in facts["layers"] if (name := scale_name(layer)) in table}
