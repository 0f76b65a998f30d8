"""Small pictures: for metadata PNG on a white card, which reads in light and dark mode; for a page SVG.

matplotlib is imported inside the functions (it takes half a second), and only its object API is used:
pyplot's global state would keep figures alive in a long-lived process and is not safe in threads.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 5.6, 2.8  # inches
_DPI = 110


@dataclass(frozen=True)
class Look:
    """Colours and file format of a picture."""

    format: Literal["png", "svg"]
    card: str
    ink: str
    grid: str
    colours: tuple[str, ...]
    """Okabe and Ito's palette without what the card swallows: distinct for colour-blind readers."""


_ON_WHITE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
CARD = Look("png", "#ffffff", "#3d4451", "#e3e6ea", _ON_WHITE)
"""For who does not know the background."""
LIGHT = Look("svg", "none", "#3d4451", "#e3e6ea", _ON_WHITE)
"""For a light background."""
DARK = Look("svg", "none", "#c9d1d9", "#343b44", ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442"))
"""For a dark background."""


def histogram(edges: Sequence[float], counts: Sequence[float], title: str, x_label: str) -> bytes:
    """A histogram of bins already counted, `edges [bins + 1]` and `counts [bins]`; raises ValueError."""
    if len(edges) != len(counts) + 1:
        raise ValueError(f"{len(counts)} counts want {len(counts) + 1} edges, found {len(edges)}")
    figure, axes = _card(title, x_label)
    if sum(counts) > 0:
        axes.stairs(counts, edges, fill=True, color=CARD.colours[0])
        axes.set_ylim(bottom=0)
    else:
        _say_empty(axes)
    return _picture(figure)


def bars(values: Sequence[float], title: str, x_label: str, *, labels: Sequence[str] | None = None) -> bytes:
    """One bar per position, counted from 1 or with a label each, and its value written above it."""
    return grouped_bars({"": values}, title, x_label, labels=labels)


def dots(values: Sequence[float], title: str, x_label: str, *, bound: float) -> bytes:
    """A dot for each of up to thousands of values, counted from 0, with a dashed line at their bound."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _card(title, x_label)
    if not values:
        _say_empty(axes)
        return _picture(figure)
    axes.plot(range(len(values)), values, "o", color=CARD.colours[0], markersize=4)
    axes.axhline(bound, color=CARD.ink, linewidth=0.8, linestyle="--", label="bound")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.15 * max(*values, bound, 1e-3))
    axes.legend(frameon=False, fontsize=8, labelcolor=CARD.ink)
    return _picture(figure)


def grouped_bars(
    series: Mapping[str, Sequence[float]],
    title: str,
    x_label: str,
    look: Look = CARD,
    labels: Sequence[str] | None = None,
) -> bytes:
    """Bars of several names side by side at each position, each with its value above.

    The positions are counted from 1 where they have no `labels`.
    """
    figure, axes = _card(title, x_label, look)
    width = 0.6 if len(series) < 2 else 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        shift = (number - (len(series) - 1) / 2) * width
        places = [position + shift for position in range(1, len(values) + 1)]
        colour = look.colours[number % len(look.colours)]
        drawn = axes.bar(places, values, width=0.95 * width, color=colour, label=name)
        axes.bar_label(drawn, fmt="%.3g", color=look.ink, fontsize=8, padding=2)
    if most := max(map(len, series.values()), default=0):
        axes.set_xticks(range(1, most + 1), labels=labels)
        axes.margins(y=0.15)
    else:
        _say_empty(axes, look)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=look.ink)
    return _picture(figure, look)


def ratios(
    rows: Mapping[str, tuple[float, float, float]], title: str, x_label: str, look: Look = CARD
) -> bytes:
    """A bar to the right per name, for `(least, value, most)`: the spread is drawn in; a line marks 1."""
    figure, axes = _card(title, x_label, look, height=1.0 + 0.32 * len(rows))
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(rows)), labels=list(rows))
    axes.invert_yaxis()
    for number, (least, value, most) in enumerate(rows.values()):
        axes.barh(number, value, height=0.6, color=look.colours[0])
        axes.plot([least, most], [number, number], color=look.ink, marker="|", linewidth=1.2)
        axes.text(max(value, most), number, f"  {value:.2f}", color=look.ink, fontsize=8, va="center")
    axes.axvline(1, color=look.ink, linewidth=0.8, linestyle="--")
    axes.margins(x=0.12)
    return _picture(figure, look)


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
        colour = CARD.colours[number % len(CARD.colours)]
        axes.plot(*zip(*points, strict=True), label=name, color=colour, linewidth=1.6, marker=marker)
        drawn += 1
    if not drawn:
        _say_empty(axes)
    elif len(series) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=CARD.ink)
    return _picture(figure)


def data_uri(picture: bytes, look: Look = CARD) -> str:
    """The picture as an address that carries its own bytes: it shows without a file or a server."""
    kind = {"png": "image/png", "svg": "image/svg+xml"}[look.format]
    return f"data:{kind};base64,{base64.b64encode(picture).decode()}"


def markdown_image(png: bytes, alt: str) -> str:
    """The picture as Markdown that carries its own bytes."""
    text = alt.replace("[", "(").replace("]", ")").replace("\n", " ")
    return f"![{text}]({data_uri(png)})"


def _card(title: str, x_label: str, look: Look = CARD, height: float = _HEIGHT) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor=look.card, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor(look.card)
    axes.set_title(title, color=look.ink, fontsize=10, loc="left", parse_math=False)
    axes.set_xlabel(x_label, color=look.ink, fontsize=9)
    axes.tick_params(colors=look.ink, labelsize=8)
    axes.grid(axis="y", color=look.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(look.ink)
    return figure, axes


def _say_empty(axes: "Axes", look: Look = CARD) -> None:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=look.ink)


def _picture(figure: "Figure", look: Look = CARD) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=look.format)
    return buffer.getvalue()
