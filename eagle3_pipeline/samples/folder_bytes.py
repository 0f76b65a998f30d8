"""How many bytes lie below a folder."""

import os
from pathlib import Path


def bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder, 0 where there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except FileNotFoundError:
                continue  # another process moved it meanwhile
    return total
