import base64
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from eagle3_pipeline.plots import (
    CARD,
    DARK,
    LIGHT,
    Look,
    bars,
    data_uri,
    dots,
    grouped_bars,
    histogram,
    lines,
    markdown_image,
    ratios,
)

PNG = b"\x89PNG\r\n\x1a\n"


def test_each_plot_is_a_png() -> None:
    pictures = [
        histogram([0, 10, 20], [3, 4], "Completion lengths", "tokens"),
        bars([0.4, 0.2, 0.1], "Acceptance by position", "speculated token"),
        bars([1.0, -0.5], "Scale by layer", "layer", labels=["2", "30"]),
        dots([0.1, 0.4, 0.0], "Truncated share by shard", "shard", bound=0.3),
        grouped_bars({"draft": [0.4, 0.2], "base draft": [0.3, 0.1]}, "Acceptance", "speculated token"),
        ratios({"gsm8k": (1.1, 1.2, 1.3), "all": (0.9, 1.0, 1.1)}, "Speed-up", "x"),
        lines([1, 2, 3], {"loss": [3.0, float("nan"), 1.0], "other": [1, 2, 3]}, "Loss", "step"),
    ]
    assert all(picture.startswith(PNG) for picture in pictures)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: histogram([0, 1], [0], "t", "x"),
        lambda: bars([], "t", "x"),
        lambda: dots([], "t", "x", bound=0.5),
        lambda: dots([0.0], "t", "x", bound=0.0),
        lambda: grouped_bars({}, "t", "x"),
        lambda: grouped_bars({"a": [0.1, 0.2], "b": [0.3]}, "t", "x"),
        lambda: ratios({}, "t", "x"),
        lambda: ratios({"once": (1.2, 1.2, 1.2), "rounded": (1.2 + 1e-16, 1.2, 1.2)}, "t", "x"),
        lambda: lines([], {}, "t", "x"),
        lambda: lines([1], {"a": [float("nan")]}, "t", "x"),
        lambda: lines([1], {"a": [1.0]}, "costs $5 and $6", "x"),
    ],
    ids=[
        *("histogram", "bars", "no dots", "one dot at nothing", "no groups", "uneven groups"),
        *("no ratios", "no spread"),
        *("no lines", "nan", "one point and dollars"),
    ],
)
def test_little_or_nothing_to_draw_still_gives_a_picture(draw: Callable[[], bytes]) -> None:
    assert draw().startswith(PNG)


def test_counts_and_edges_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 counts want 3 edges"):
        histogram([0, 1], [1, 2], "t", "x")


def test_the_card_is_white_so_that_it_reads_in_dark_mode() -> None:
    from matplotlib.image import imread

    pixels: Any = imread(io.BytesIO(bars([1.0], "t", "x")))
    assert pixels[0, 0].tolist() == [1.0, 1.0, 1.0, 1.0]


def _luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, as WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    ("look", "background"),
    [(CARD, CARD.card), (LIGHT, "#ffffff"), (DARK, "#1f1f1f")],
    ids=["card", "light", "dark"],
)
def test_writing_and_the_first_lines_stand_out_from_what_is_behind_them(look: Look, background: str) -> None:
    """WCAG 2 asks for 4.5 of writing and 3 of graphics; no picture of ours has more than three names."""
    assert _contrast("#000000", "#ffffff") == pytest.approx(21)
    assert _contrast(look.ink, background) > 4.5
    assert min(_contrast(colour, background) for colour in look.colours[:3]) > 3


@pytest.mark.parametrize("look", [LIGHT, DARK], ids=["light", "dark"])
def test_a_picture_for_a_page_has_no_background_of_its_own_and_its_writing_is_readable_there(
    look: Look,
) -> None:
    for drawn in (
        grouped_bars({"draft": [0.4], "base draft": [0.3]}, "t", "x", look),
        ratios({"all": (1.1, 1.2, 1.3)}, "t", "x", look),
    ):
        styles = [one.get("style", "") for one in ElementTree.fromstring(drawn).iter()]
        assert any(look.ink in style for style in styles)
        assert not any(f"fill: {CARD.card}" in style for style in styles)


def test_an_address_of_a_picture_says_what_it_is() -> None:
    assert data_uri(b"bytes", LIGHT) == f"data:image/svg+xml;base64,{base64.b64encode(b'bytes').decode()}"


def test_markdown_carries_the_picture_and_an_alt_text_that_cannot_break_it() -> None:
    text = markdown_image(b"bytes", "a [b]\nc")
    assert text == f"![a (b) c](data:image/png;base64,{base64.b64encode(b'bytes').decode()})"


def test_plots_load_neither_pyplot_nor_torch_and_matplotlib_only_to_draw() -> None:
    program = (
        "import sys; from eagle3_pipeline.plots import bars; assert 'matplotlib' not in sys.modules; "
        "bars([1.0], 't', 'x');"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_evaluation_and_release_import_without_torch_or_matplotlib() -> None:
    program = (
        "import sys, eagle3_pipeline.evaluation.evaluation, eagle3_pipeline.release.release;"
        "assert not {'torch', 'matplotlib', 'safetensors', 'transformers', 'speculators'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
