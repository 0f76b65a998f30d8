"""A model that a manifest points to: made by one process at a time, and made again when it is gone."""

import contextlib
import fcntl
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from eagle3_pipeline.hub import download
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.model_folder import is_whole

logger = logging.getLogger(__name__)


def make_model(place: Place, make: Callable[[Place, Manifest | None], Manifest]) -> Manifest:
    """The manifest of a model that is there, or what `make` makes of the place and the manifest before."""
    if (found := place.manifest()) is not None and _stands(place, found):
        return found
    place.folder.mkdir(parents=True, exist_ok=True)
    with _alone(place.folder):
        if (found := place.manifest()) is not None and _stands(place, found):
            return found
        if found is not None:
            logger.info("the model in %s is not whole any more and is made again", found.facts["model_path"])
        return make(place, found)


def fetch(
    path: Path | None, hub_id: str | None, revision: str, before: Manifest | None, beside: tuple[str, ...]
) -> tuple[Path, dict[str, str]]:
    """The model's folder and, of the hub, its commit: a branch is looked up once, `main` may have moved.

    `beside` are patterns of the files to have next to the weights. Raises as `download` does.
    """
    if path is not None:
        return path, {}
    commit = before.facts.get("revision") if before is not None else None
    folder = download(str(hub_id), commit or revision, beside)
    return folder, {"revision": folder.name}  # the hub's cache has .../snapshots/<commit>


def _stands(place: Place, manifest: Manifest) -> bool:
    sizes = {place.folder / entry.path: entry.bytes for entry in manifest.files}
    return is_whole(place.folder / manifest.facts["model_path"]) and all(
        path.is_file() and path.stat().st_size == size for path, size in sizes.items()
    )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A second process waits, and finds the model made: none deletes what another is writing."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is making %s; waiting for it", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
