"""What each layer's states look like, by which one layer is told from another without a second model.

    id         2       15      27      30      layers as they are stored (SmolLM2)
    scale     1.01    1.86    3.14    3.42     log of the RMS of a row: its median over a sample's rows
    cosine        0.78    0.37    0.61         of a row and the same row of the next stored layer, likewise

A residual stream grows from layer to layer and turns slowly, so both are much the same for all samples of a
target. Layers that are swapped or captured twice are seen in one sample. A layer off by one is seen in the
means over several, unless two neighbours in the middle of a deep target are as good as the same:
tests compare those with another implementation of the model. Medians do not see the few rows of huge
states that many targets have.

    T tokens of a sample, L stored layers, H hidden size
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from eagle3_pipeline.errors import DamagedFile

_ROWS = 64  # rows of a sample that are measured, evenly spread: their median is as good as that of all
_SAMPLES_FIRST = 32  # before that, a spread is a guess
_SPREADS = 8.0
_ERRORS = 5.0
# Differences of a log RMS and of a cosine that no sample is accused of: bfloat16's rounding makes a hundredth
# of them, an unusual choice of words up to half. Of a mean over samples half as much is borne.
_SCALE_FLOOR, _COSINE_FLOOR = 0.1, 0.02


class LayerTable:
    """Mean and spread of both measures over the samples that were added."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.samples = 0
        values = 2 * len(self.layers) - 1
        self._mean = torch.zeros(values, dtype=torch.float64)
        self._squares = torch.zeros(values, dtype=torch.float64)  # sum of squared distances from the mean
        self._floor = torch.full((values,), _SCALE_FLOOR, dtype=torch.float64)
        self._floor[len(self.layers) :] = _COSINE_FLOOR

    def judge(self, states: torch.Tensor) -> str | None:
        """Why `states` `[T, L, H]` are not like those before: `scale_differs`, `correlation_differs` or None.

        None as long as fewer than 32 samples were added.
        """
        if self.samples < _SAMPLES_FIRST:
            return None
        far = (_measured(states) - self._mean).abs() > (_SPREADS * self._spread()).maximum(self._floor)
        if bool(far[: len(self.layers)].any()):
            return "scale_differs"
        return "correlation_differs" if bool(far.any()) else None

    def add(self, states: torch.Tensor) -> None:
        """Take finite `states` `[T, L, H]`, T > 0, that passed all checks into the table."""
        values = _measured(states)
        self.samples += 1
        before = values - self._mean
        self._mean += before / self.samples
        self._squares += before * (values - self._mean)

    def differs_from(self, other: "LayerTable") -> str | None:
        """What is another layer than in `other`, a table of the same target, as a sentence, or None.

        Means over samples are compared: they differ by the choice of the samples, and no more.
        """
        if self.layers != other.layers:
            return f"layers {list(self.layers)} were captured, expected {list(other.layers)}"
        if not self.samples or not other.samples:
            return None
        errors = (self._spread() ** 2 / self.samples + other._spread() ** 2 / other.samples).sqrt()
        distance = (self._mean - other._mean).abs()
        beyond = distance - (_ERRORS * errors).maximum(self._floor / 2)
        worst = int(beyond.argmax())
        if beyond[worst] <= 0:
            return None
        return (
            f"{self._name(worst)} is {self._mean[worst]:.3f} over {self.samples} samples, expected "
            f"{other._mean[worst]:.3f} as over {other.samples} samples before"
        )

    def to_json(self) -> dict[str, Any]:
        """The table as JSON values; floats come back exactly."""
        return {
            "layers": list(self.layers),
            "samples": self.samples,
            "mean": self._mean.tolist(),
            "squares": self._squares.tolist(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The table of `to_json`; raises DamagedFile."""
        try:
            table = cls([int(layer) for layer in value["layers"]])
            table.samples = int(value["samples"])
            mean = torch.tensor(value["mean"], dtype=torch.float64)
            squares = torch.tensor(value["squares"], dtype=torch.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(
                f"no table of layers: {error!r}. Delete it, so that it is measured again."
            ) from error
        if mean.shape != table._mean.shape or squares.shape != table._mean.shape:
            raise DamagedFile(
                f"a table of {len(table.layers)} layers with {mean.numel()} means and {squares.numel()} "
                f"spreads, expected {table._mean.numel()} of each. Delete it, so that it is measured again."
            )
        table._mean, table._squares = mean, squares
        return table

    def facts(self) -> dict[str, Any]:
        """Mean log RMS by layer, and mean cosine by pair of neighbours, for people."""
        return {
            self._name(place): round(float(value), 3)
            for place, value in enumerate(self._mean)
            if self.samples
        }

    def _spread(self) -> torch.Tensor:
        return (self._squares / max(self.samples - 1, 1)).sqrt()

    def _name(self, place: int) -> str:
        if place < len(self.layers):
            return f"the log scale of layer {self.layers[place]}"
        first = place - len(self.layers)
        return f"the cosine of layers {self.layers[first]} and {self.layers[first + 1]}"


def _measured(states: torch.Tensor) -> torch.Tensor:
    """Median log RMS of each layer and median cosine of neighbouring ones, `[2 L - 1]`."""
    step = max(1, math.ceil(len(states) / _ROWS))
    rows = states[::step].float()
    lengths = torch.linalg.vector_norm(rows, dim=2)
    scale = (lengths / math.sqrt(rows.shape[2])).log()
    products = (rows[:, :-1] * rows[:, 1:]).sum(dim=2)
    cosine = products / (lengths[:, :-1] * lengths[:, 1:])
    return torch.cat([scale, cosine], dim=1).median(dim=0).values.double()
