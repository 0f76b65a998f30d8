"""The released draft: past its gate, verified, served once, with all that others need to serve and trust it.

<storage root>/<recipe slug>/released_draft/<fingerprint>/
    config.json  model.safetensors  ...    the checkpoint's own bytes, which vLLM and speculators load
    eagle3/                                the same weights as SGLang and SpecForge load them, where they can
    README.md  provenance.json             what it is, how to serve it, what made it
    SHA256SUMS                             of all files above: sha256sum -c
    manifest.json                          last; its facts name no folder of this machine

It gets its number, and goes where the recipe says, in publishing.py.
"""

import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_pipeline.durable_files import (
    full_disk_named,
    link_or_copy,
    sha256_of_file,
    write_atomic,
    write_json,
)
from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import FileEntry, Manifest, Place
from eagle3_pipeline.release.card import model_card
from eagle3_pipeline.release.eagle3_layout import write_eagle3_layout
from eagle3_pipeline.release.expected import Expected
from eagle3_pipeline.release.gate import check_gate
from eagle3_pipeline.release.names import release_name, target_name
from eagle3_pipeline.release.provenance_record import provenance_record
from eagle3_pipeline.release.smoke import smoke
from eagle3_pipeline.release.verification import verify_draft
from eagle3_pipeline.release.versions import SUMS_NAME
from eagle3_pipeline.sole_writer import sole_writer

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

logger = logging.getLogger(__name__)

ServerWith = Callable[[Path], AbstractContextManager["RunningServer"]]
"""Gives the evaluation's server with the draft in a folder. It should stop when left."""

_DRAFT = "draft/"
_EAGLE3 = "eagle3"
_FULL_DISK = "Free some space and materialise released_draft again: what is complete is kept."


def release_draft(lineage: Lineage, server_with: ServerWith) -> Manifest:
    """Check, copy, describe and serve the draft; nothing is done where the release is there.

    Raises QualityError (the gate, or other acceptance than the report's), DamagedFile (the draft or its
    report is not what was made), MissingInput, RecipeError, Busy (another process makes it), NotEnoughRoom
    and ServerError.
    """
    place, name = lineage.released_draft(), release_name(lineage.recipe)
    if (found := place.manifest()) is not None:
        return found
    place.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = place.folder.with_name(f".{place.folder.name}.lock")
    with (
        full_disk_named(place.folder, _FULL_DISK),
        sole_writer(lock, f"{place.folder} is being made by another process"),
    ):
        return place.manifest() or _make(lineage, place, name, server_with)


def _make(lineage: Lineage, place: Place, name: str, server_with: ServerWith) -> Manifest:
    gate = check_gate(lineage.recipe, lineage.acceptance_report().verify().facts)
    entries = _verified_files(lineage)
    folder, trained = place.folder, lineage.draft_checkpoint().folder
    shutil.rmtree(folder, ignore_errors=True)  # what a kill left of it
    folder.mkdir(parents=True)
    files = [
        _take(trained / entry.path, folder / entry.path.removeprefix(_DRAFT), entry) for entry in entries
    ]
    verifier = target_name(lineage.recipe.target)
    eagle3 = write_eagle3_layout(folder, lineage.model_path(), folder / _EAGLE3, verifier)
    without = eagle3 if isinstance(eagle3, str) else None
    files += [] if isinstance(eagle3, str) else eagle3
    files += _describe(lineage, folder, name, without)
    files.append(_write_sums(folder, files))
    with server_with(folder) as server:
        served = smoke(lineage, server)
    manifest = place.finish(files, {"name": name, "gate": gate, "smoke": served, "without_eagle3": without})
    logger.info("released %s: %s", name, folder)
    return manifest


def _describe(lineage: Lineage, folder: Path, name: str, without_eagle3: str | None) -> list[Path]:
    """Write provenance and model card; `without_eagle3` is why there is no eagle3/, where there is none."""
    provenance = provenance_record(lineage)
    write_json(folder / "provenance.json", provenance)
    write_atomic(folder / "README.md", model_card(lineage, name, provenance, without_eagle3))
    return [folder / "provenance.json", folder / "README.md"]


def _write_sums(folder: Path, files: list[Path]) -> Path:
    """Write the checksums as sha256sum reads them."""
    lines = [f"{sha256_of_file(path)}  {path.relative_to(folder).as_posix()}\n" for path in sorted(files)]
    write_atomic(folder / SUMS_NAME, "".join(lines))
    return folder / SUMS_NAME


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
