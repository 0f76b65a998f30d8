"""Small pictures for metadata, as PNG bytes: on a white card, so that they read in light and dark mode.

matplotlib is imported inside the functions (it takes half a second), and only its object API is used:
pyplot's global state would keep figures alive in a long-lived process and is not safe in threads.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES = (5.6, 2.8)
_DPI = 110
_CARD, _INK, _GRID = "#ffffff", "#3d4451", "#e3e6ea"
# Okabe and Ito's palette without its yellow: distinct for colour-blind readers, all dark enough on white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def histogram(edges: Sequence[float], counts: Sequence[float], title: str, x_label: str) -> bytes:
    """A histogram of bins already counted, `edges [bins + 1]` and `counts [bins]`; raises ValueError."""
    if len(edges) != len(counts) + 1:
        raise ValueError(f"{len(counts)} counts want {len(counts) + 1} edges, found {len(edges)}")
    figure, axes = _card(title, x_label)
    if sum(counts) > 0:
        axes.stairs(counts, edges, fill=True, color=_COLOURS[0])
        axes.set_ylim(bottom=0)
    else:
        _say_empty(axes)
    return _png(figure)


def bars(values: Sequence[float], title: str, x_label: str) -> bytes:
    """One bar per position, counted from 1, with its value written above: the acceptance at each position."""
    figure, axes = _card(title, x_label)
    if values:
        positions = range(1, len(values) + 1)
        drawn = axes.bar(positions, values, width=0.6, color=_COLOURS[0])
        axes.bar_label(drawn, fmt="%.3g", color=_INK, fontsize=8, padding=2)
        axes.set_xticks(positions)
        axes.margins(y=0.15)
    else:
        _say_empty(axes)
    return _png(figure)


def lines(xs: Sequence[float], series: Mapping[str, Sequence[float]], title: str, x_label: str) -> bytes:
    """One line per name over the same `xs`, such as loss by step; see `curves`."""
    return curves({name: (xs, ys) for name, ys in series.items()}, title, x_label)


def curves(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, x_label: str) -> bytes:
    """One line per name, each over its own `(xs, ys)`; points that are not finite are left out.

    Raises ValueError for `ys` of another length than their `xs`.
    """
    figure, axes = _card(title, x_label)
    drawn = 0
    for number, (name, (xs, ys)) in enumerate(series.items()):
        points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
        if not points:
            continue
        marker = "o" if len(points) < 2 else None  # a line of one point would be invisible
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(*zip(*points, strict=True), label=name, color=colour, linewidth=1.6, marker=marker)
        drawn += 1
    if not drawn:
        _say_empty(axes)
    elif len(series) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=_INK)
    return _png(figure)


def markdown_image(png: bytes, alt: str) -> str:
    """The picture as Markdown that carries its own bytes: it shows without a file or a server."""
    text = alt.replace("[", "(").replace("]", ")").replace("\n", " ")
    return f"![{text}](data:image/png;base64,{base64.b64encode(png).decode()})"


def _card(title: str, x_label: str) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DPI, facecolor=_CARD, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor(_CARD)
    axes.set_title(title, color=_INK, fontsize=10, loc="left", parse_math=False)
    axes.set_xlabel(x_label, color=_INK, fontsize=9)
    axes.tick_params(colors=_INK, labelsize=8)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_INK)
    return figure, axes


def _say_empty(axes: "Axes") -> None:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=_INK)


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", backend="agg")
    return buffer.getvalue()
