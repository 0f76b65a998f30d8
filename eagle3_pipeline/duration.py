"""How long something takes, as a person reads it in a progress line."""


def in_words(seconds: float) -> str:
    """`45 s`, `12 min` or `1.5 h`: no more exact than an estimate is."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
