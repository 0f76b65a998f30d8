"""The released draft: verified, past its gate, with all that somebody else needs to serve and trust it.

<storage root>/<recipe slug>/
    released_draft/<fingerprint>/
        config.json  model.safetensors  ...    the checkpoint's own bytes
        README.md  provenance.json             what it is, how to serve it, what made it
        SHA256SUMS                             of all files above: sha256sum -c
        manifest.json                          last
    released/<name> -> ../released_draft/<fingerprint>      the newest release, moved by rename
"""

import logging
import os
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import (
    fsync_folder,
    link_or_copy,
    sha256_of_file,
    write_atomic,
    write_json,
)
from eagle3_pipeline.errors import DamagedFile, MissingInput, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import FileEntry, Manifest
from eagle3_pipeline.recipe.settings import Recipe
from eagle3_pipeline.release.card import model_card, serve_line
from eagle3_pipeline.release.gate import check_gate
from eagle3_pipeline.release.provenance_record import provenance_record
from eagle3_pipeline.release.verification import Expected, verify_draft

logger = logging.getLogger(__name__)

_DRAFT = "draft/"


def release_draft(lineage: Lineage) -> Manifest:
    """Check, copy and describe the draft; only the link is renewed when the release is there.

    Raises QualityError (the gate), DamagedFile (the draft is not what was trained), MissingInput and
    RecipeError.
    """
    place = lineage.released_draft()
    name = release_name(lineage.recipe)
    link = lineage.folder / "released" / name
    if (found := place.manifest()) is not None:
        _point(link, place.folder)
        return found
    gate = check_gate(lineage.recipe, lineage.acceptance_report().require().facts)
    entries = _verified_files(lineage)
    place.folder.mkdir(parents=True, exist_ok=True)
    source = lineage.draft_checkpoint().folder
    files = [
        _take(source / entry.path, place.folder / entry.path.removeprefix(_DRAFT), entry) for entry in entries
    ]
    provenance = provenance_record(lineage)
    write_json(place.folder / "provenance.json", provenance)
    write_atomic(place.folder / "README.md", model_card(lineage, name, provenance))
    files += [place.folder / "provenance.json", place.folder / "README.md"]
    sums = [
        f"{sha256_of_file(path)}  {path.relative_to(place.folder).as_posix()}\n" for path in sorted(files)
    ]
    write_atomic(place.folder / "SHA256SUMS", "".join(sums))
    facts: dict[str, Any] = {
        "path": str(place.folder),
        "name": name,
        "gate": gate,
        "serve": serve_line(lineage.recipe, str(link), target=str(lineage.model_path())),
    }
    manifest = place.finish([*files, place.folder / "SHA256SUMS"], facts)
    _point(link, place.folder)
    logger.info("released %s: %s", name, link)
    return manifest


def release_name(recipe: Recipe) -> str:
    """The name of the release and of its link; raises RecipeError if it is no single folder name."""
    name = recipe.release.name or f"{recipe.name}-eagle3"
    if Path(name).name != name or name in (".", ".."):
        raise RecipeError(
            f"release.name is {name!r}: expected one folder name without slashes, such as my-model-eagle3"
        )
    return name


def _verified_files(lineage: Lineage) -> list[FileEntry]:
    """The checkpoint's files of the draft, after their checksums, config and tensors were checked."""
    checkpoint = lineage.draft_checkpoint()
    entries = [entry for entry in checkpoint.verify().files if entry.path.startswith(_DRAFT)]
    if not entries:
        raise MissingInput(
            f"the manifest in {checkpoint.folder} lists no file of draft/. Materialise draft_checkpoint."
        )
    unlisted = {path.name for path in (checkpoint.folder / _DRAFT).iterdir()} - {
        entry.path.removeprefix(_DRAFT).partition("/")[0] for entry in entries
    }
    if unlisted:
        raise DamagedFile(
            f"{checkpoint.folder / _DRAFT} has files that training did not make: "
            f"{', '.join(sorted(unlisted))}. vLLM would read them, a release would not have them: move them "
            "away."
        )
    verify_draft(checkpoint.folder / "draft", Expected.of(lineage))
    return entries


def _take(source: Path, target: Path, entry: FileEntry) -> Path:
    """Hard-link or copy one file and compare its checksum. Neither is ever written in place later."""
    link_or_copy(source, target)
    if (found := sha256_of_file(target)) != entry.sha256:
        raise DamagedFile(
            f"{target} has checksum {found[:12]}, {source} had {entry.sha256[:12]} when it was made. Check "
            "the disk, then materialise released_draft again."
        )
    return target


def _point(link: Path, folder: Path) -> None:
    """Make `link` lead to `folder`, at no moment nowhere. Relative: the storage root may be moved."""
    wanted = os.path.relpath(folder, link.parent)
    if link.is_symlink() and str(link.readlink()) == wanted:
        return
    if link.exists() and not link.is_symlink():
        raise DamagedFile(f"{link} is no link of ours. Move it away and materialise released_draft again.")
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(wanted)
    temporary.replace(link)
    fsync_folder(link.parent)
