"""A finished release without a model in it: a few files that were checked and described, as it seems."""

import hashlib
from pathlib import Path
from typing import Any

from eagle3_pipeline.lineage import Lineage
from tests.release.made import made_lineage, make_checkpoint, make_report, recipe

NAME = "tiny.cpu-eagle3"
FILES = {
    "README.md": b"---\nlicense: mit\n---\n",
    "config.json": b"{}",
    "eagle3/config.json": b'{"flat": true}',
    "eagle3/model.safetensors": b"e" * 3000,
    "model.safetensors": b"w" * 5000,
    "provenance.json": b"{}",
}


def finished(root: Path, files: dict[str, bytes] | None = None, **release: Any) -> Lineage:
    """The lineage below `root` whose release has `files`; another `license` is another release."""
    lineage = made_lineage(root, release=release)
    make_checkpoint(lineage, weights=False)
    make_report(lineage)
    place = lineage.released_draft()
    content = FILES if files is None else files
    sums = [f"{hashlib.sha256(value).hexdigest()}  {name}\n" for name, value in sorted(content.items())]
    written = {**content, "SHA256SUMS": "".join(sums).encode()}
    for name, value in written.items():
        path = place.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
    place.finish([place.folder / name for name in written], {"name": NAME})
    return lineage


def lineage_below(root: Path, **release: Any) -> Lineage:
    """What `finished` made, found again."""
    return Lineage(recipe(root / "recipe", release=release), root / "storage")


def content_of(folder: Path) -> dict[str, bytes]:
    """The files below a folder, without the checksums."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
