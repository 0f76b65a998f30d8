"""What each layer's states look like, by which one layer is told from another without a second model.

    id         2       15      27      30      layers as they are stored (SmolLM2)
    scale     1.01    1.86    3.14    3.42     log of the RMS of a row: its median over a sample's rows
    cosine        0.78    0.37    0.61         of a row and the same row of the next stored layer, likewise

A residual stream grows from layer to layer and turns slowly, so both are much the same for all samples of a
target. Layers that are swapped or captured twice are seen in one sample. A layer off by one is seen in the
means over several, unless two neighbours in the middle of a deep target are as good as the same:
tests compare those with another implementation of the model. Medians do not see the few rows of huge
states that many targets have.

The first 32 samples settle the table, and nobody is judged before: `measurement.py` captures them before any
other. What is far from all the rest, then or later, stays out of it, or a single wrong sample would widen
the bounds for good.

    T tokens of a sample, L stored layers, H hidden size
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.extraction.scales import scale_name

_logger = logging.getLogger(__name__)

SAMPLES_FIRST = 32
"""Samples that settle a table: of fewer, a spread is a guess."""
_ROWS = 64  # rows of a sample that are measured, evenly spread: their median is as good as that of all
_LEFT_OUT = SAMPLES_FIRST // 8  # of the first ones at most: more are no wrong ones, but another kind
_SPREADS = 8.0
_ERRORS = 5.0
# Differences of a log RMS and of a cosine that no sample is accused of: bfloat16's rounding makes a hundredth
# of them, an unusual choice of words up to half. Of a mean over samples half as much is borne.
_SCALE_FLOOR, _COSINE_FLOOR = 0.1, 0.02


@dataclass(frozen=True)
class _Moments:
    """Of the values `[2 L - 1]` of so many samples; replaced as a whole, since others may be reading."""

    samples: int
    mean: torch.Tensor
    squares: torch.Tensor
    """Sum of squared distances from the mean."""

    @classmethod
    def of(cls, values: torch.Tensor) -> Self:
        """Of `[samples, 2 L - 1]`."""
        mean = values.mean(dim=0)
        return cls(len(values), mean, (values - mean).square().sum(dim=0))

    def with_one_more(self, values: torch.Tensor) -> "_Moments":
        before = values - self.mean
        mean = self.mean + before / (self.samples + 1)
        return _Moments(self.samples + 1, mean, self.squares + before * (values - mean))

    @property
    def spread(self) -> torch.Tensor:
        return (self.squares / max(self.samples - 1, 1)).sqrt()


class LayerTable:
    """Mean and spread of both measures over the samples that were added. One thread adds, any may judge."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.is_settled = False
        self._path: Path | None = None
        values = 2 * len(self.layers) - 1
        nothing = torch.zeros(values, dtype=torch.float64)
        self._moments = _Moments(0, nothing, nothing)
        self._first: list[torch.Tensor] = []
        self._floor = torch.full((values,), _SCALE_FLOOR, dtype=torch.float64)
        self._floor[len(self.layers) :] = _COSINE_FLOOR

    @property
    def samples(self) -> int:
        """Samples in the table."""
        return self._moments.samples

    def judge(self, states: torch.Tensor) -> str | None:
        """Why `states` `[T, L, H]` are not like those before: `scale_differs`, `correlation_differs` or None.

        None as long as the table is not settled.
        """
        return self.reason_in(measured(states))

    def add(self, states: torch.Tensor) -> None:
        """Take finite `states` `[T, L, H]`, T > 0, that passed all checks into the table.

        A settled table leaves out what `judge` finds.
        """
        self.add_measured(measured(states))

    def add_measured(self, values: torch.Tensor) -> None:
        """As `add`, with what `measured` gave for the states."""
        if self.is_settled:
            if self.reason_in(values) is None:
                self._moments = self._moments.with_one_more(values)
            return
        self._first.append(values)
        self._moments = _Moments.of(torch.stack(self._first))
        if len(self._first) == SAMPLES_FIRST:
            self._settle(torch.stack(self._first))

    def _settle(self, first: torch.Tensor) -> None:
        """Leave out those of the `first` values `[32, 2 L - 1]` that are far from the rest, at most four."""
        distance = (first - first.median(dim=0).values).abs()
        spread = distance.sort(dim=0).values[:-_LEFT_OUT].square().mean(dim=0).sqrt()
        times = (distance / (_SPREADS * spread).maximum(self._floor)).amax(dim=1)
        fits = times <= times.sort().values[-_LEFT_OUT - 1].clamp(min=1.0)
        if left_out := len(first) - int(fits.sum()):
            _logger.warning(f"{left_out} of the first {len(first)} samples have layers unlike the others'")
        self._moments = _Moments.of(first[fits])
        self.is_settled = True
        self._first.clear()

    @property
    def _bound(self) -> torch.Tensor:
        """How far the values of a sample may be from the mean."""
        return (_SPREADS * self._moments.spread).maximum(self._floor)

    def reason_in(self, values: torch.Tensor) -> str | None:
        """As `judge`, with what `measured` gave for the states."""
        if not self.is_settled:
            return None
        far = (values - self._moments.mean).abs() > self._bound
        if bool(far[: len(self.layers)].any()):
            return "scale_differs"
        return "correlation_differs" if bool(far.any()) else None

    def differs_from(self, settled: "LayerTable") -> str | None:
        """What is another layer than in `settled`, a table of the same target, as a sentence, or None.

        Means over samples are compared: they differ by the choice of the samples, and no more. How much one
        sample differs from another is known from `settled`; this table may have a single one.
        """
        if self.layers != settled.layers:
            return f"layers {list(self.layers)} were captured, expected {list(settled.layers)}"
        if not self.samples or not settled.is_settled:
            return None
        here, there = self._moments, settled._moments
        errors = there.spread * math.sqrt(1 / here.samples + 1 / there.samples)
        # One sample as odd as `judge` bears is no reason either.
        bound = (_ERRORS * errors).maximum(self._floor / 2).maximum(settled._bound / here.samples)
        beyond = (here.mean - there.mean).abs() - bound
        worst = int(beyond.argmax())
        if beyond[worst] <= 0:
            return None
        where = f" (in {settled._path}: delete it only if that was the wrong one)" if settled._path else ""
        return (
            f"{self._name(worst)} is {here.mean[worst]:.3f} over {here.samples} samples, expected "
            f"{there.mean[worst]:.3f} as over {there.samples} samples before{where}"
        )

    def write(self, path: Path) -> None:
        """Keep a settled table in `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        moments = self._moments
        numbers = {"mean": moments.mean.tolist(), "squares": moments.squares.tolist()}
        write_json(path, {"layers": list(self.layers), "samples": moments.samples} | numbers)
        self._path = path

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The table that is kept in `path`, None where there is none; raises DamagedFile."""
        try:
            table = cls._from_json(json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(
                f"{path} is no table of layers ({error!r}). Delete it, so that it is measured again."
            ) from error
        table._path = path
        return table

    @classmethod
    def _from_json(cls, value: Mapping[str, Any]) -> Self:
        table = cls([int(layer) for layer in value["layers"]])
        mean = torch.tensor(value["mean"], dtype=torch.float64)
        squares = torch.tensor(value["squares"], dtype=torch.float64)
        for values in (mean, squares):
            if values.shape != table._floor.shape or not bool(values.isfinite().all()):
                raise ValueError(f"{values.tolist()} are not {len(table._floor)} numbers")
        if bool((squares < 0).any()) or int(value["samples"]) < SAMPLES_FIRST - _LEFT_OUT:
            raise ValueError(f"{value['samples']} samples, squares {squares.tolist()}")
        table._moments = _Moments(int(value["samples"]), mean, squares)
        table.is_settled = True
        return table

    def facts(self) -> dict[str, Any]:
        """Mean log RMS by layer, and mean cosine by pair of neighbours, for people."""
        moments = self._moments
        return {
            self._name(place): round(float(value), 3)
            for place, value in enumerate(moments.mean)
            if moments.samples
        }

    def _name(self, place: int) -> str:
        if place < len(self.layers):
            return scale_name(self.layers[place])
        first = place - len(self.layers)
        return f"the cosine of layers {self.layers[first]} and {self.layers[first + 1]}"


def measured(states: torch.Tensor) -> torch.Tensor:
    """Median log RMS of each layer and median cosine of neighbouring ones, `[2 L - 1]`."""
    step = max(1, math.ceil(len(states) / _ROWS))
    rows = states[::step].float()
    lengths = torch.linalg.vector_norm(rows, dim=2)
    scale = (lengths / math.sqrt(rows.shape[2])).log()
    products = (rows[:, :-1] * rows[:, 1:]).sum(dim=2)
    cosine = products / (lengths[:, :-1] * lengths[:, 1:])
    return torch.cat([scale, cosine], dim=1).median(dim=0).values.double()
