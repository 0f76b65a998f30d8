"""Models of the Hugging Face hub, in its local cache: at one commit, only what is needed, if it fits.

    weights       as model_folder.py says
    other files   those of the caller's patterns, at any depth
    never         pickles (*.bin, *.pt, ...): they can run code when they are read

A branch is looked up once, and everything is fetched at the commit that it stood for. What is whole in the
cache stays: a download that was interrupted goes on with the files that are not.
"""

import fnmatch
import glob
import logging
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import full_disk_named, require_free_bytes
from eagle3_pipeline.errors import BadInput, Eagle3Error, SourceUnreachable
from eagle3_pipeline.model_folder import INDEX_NAME, ONE_FILE, is_whole, pickles_among, weight_names

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "HF_TOKEN"
_STATUSES_THAT_PASS = {408, 429, *range(500, 600)}
_ROOM = "Free some space there, or point HF_HOME to a larger disk. What is whole in the cache is kept."


def download(hub_id: str, revision: str, beside: tuple[str, ...]) -> Path:
    """The folder `.../snapshots/<commit>` of a model, whole; `beside` are patterns of files next to weights.

    Raises BadInput, SourceUnreachable, and NotEnoughRoom before the first byte or when the disk is full.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    try:
        with full_disk_named(cache, _ROOM):
            # The cache keeps what a branch stood for, so that it is found without the hub as well.
            commit = HfApi().resolve_revision(hub_id, revision=revision).resolved
            info = HfApi().model_info(hub_id, revision=commit, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
            wanted = _wanted(hub_id, commit, set(sizes), beside)
            _require_room(cache, hub_id, commit, {name: sizes[name] for name in wanted})
            patterns = [glob.escape(name) for name in wanted]
            return Path(snapshot_download(hub_id, revision=commit, allow_patterns=patterns))
    except Eagle3Error:
        raise
    except Exception as error:  # of the hub, its transport and its cache: some twenty classes
        if (folder := _cached(hub_id, revision, beside)) is not None:
            logger.info("%s is taken from the cache, since the hub cannot be asked: %s", hub_id, error)
            return folder
        raise _failed(hub_id, revision, error) from error


def _wanted(hub_id: str, commit: str, names: set[str], beside: tuple[str, ...]) -> list[str]:
    """Names of the files to have; raises BadInput where there are no weights, or the index names others."""
    from huggingface_hub import hf_hub_download

    index = None
    if INDEX_NAME in names:
        index = Path(hf_hub_download(hub_id, INDEX_NAME, revision=commit)).read_text()
    try:
        weights = weight_names(names, index) | ({INDEX_NAME} & names)
    except ValueError as error:
        raise BadInput(
            f"{INDEX_NAME} of {hub_id} at {commit} does not say where the weights are ({error}). Take "
            "another revision of it, or name a local folder with path in the recipe."
        ) from error
    if missing := sorted(weights - names):
        raise BadInput(
            f"{hub_id} at {commit} lacks {', '.join(missing[:3])}, which its own {INDEX_NAME} names. Take "
            "another revision of it, or name a local folder with path in the recipe."
        )
    if not weights:
        raise BadInput(f"{hub_id} at {commit} has no *.safetensors{pickles_among(names)}")
    others = {name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in beside)}
    return sorted(weights | others)


def _require_room(cache: Path, hub_id: str, commit: str, sizes: dict[str, int]) -> None:
    """Raise NotEnoughRoom unless what is not in the cache yet fits on its disk."""
    from huggingface_hub import try_to_load_from_cache

    missing = {
        name: size
        for name, size in sizes.items()
        if not isinstance(try_to_load_from_cache(hub_id, name, revision=commit), str)
    }
    if missing:
        size = sum(missing.values())
        require_free_bytes(cache, size, f"downloading {hub_id}", _ROOM)
        logger.info(
            "downloading %s at %s: %d of %d files, %.1f GB",
            *(hub_id, commit, len(missing), len(sizes), size / 1e9),
        )


def _cached(hub_id: str, revision: str, beside: tuple[str, ...]) -> Path | None:
    """The model in the cache if all that is wanted of it is there."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=list(beside), local_files_only=True)
        )
        wanted = _wanted(hub_id, folder.name, _known_names(hub_id, folder), beside)
    except Exception:  # as above: whatever it is, the model is not there
        return None
    return folder if is_whole(folder) and all((folder / name).is_file() for name in wanted) else None


def _known_names(hub_id: str, folder: Path) -> set[str]:
    """All files that a commit in the cache has; raises LookupError where the cache does not know.

    Older libraries kept no list. Then what is there must say by itself that its weights are all.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return {file.path for file in get_cached_repo_tree(hub_id, revision=folder.name)}
    except CachedRepoTreeNotFoundError:
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        if names.isdisjoint((INDEX_NAME, ONE_FILE)):
            raise LookupError(f"which weights {hub_id} has is not known") from None
        return names


def _failed(hub_id: str, revision: str, error: Exception) -> Eagle3Error:
    what = (
        f"{hub_id} at {revision} can be neither downloaded nor found in the local cache "
        f"({type(error).__name__}: {error})."
    )
    if is_passing(error):
        return SourceUnreachable(
            f"{what} Another attempt may reach it, and goes on with what is missing; if none does, check the "
            "network and the proxy, or name a local folder with path in the recipe."
        )
    return BadInput(
        f"{what} Check the id, the revision, the network and HF_TOKEN, or name a local folder with path in "
        "the recipe."
    )


def is_passing(error: BaseException) -> bool:
    """Whether the network or the hub failed, and may be back soon; libraries wrap such errors in others."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)
    if any(isinstance(one, OfflineModeIsEnabled) for one in chain):
        return False
    for one in chain:
        response: Any = getattr(one, "response", None)
        if (status := getattr(response, "status_code", None)) is not None:
            return status in _STATUSES_THAT_PASS
        # httpx or httpx2, after the version of huggingface_hub
        if any(kind.__name__ == "TransportError" for kind in type(one).__mro__):
            return True
        if isinstance(one, ConnectionError | TimeoutError):
            return True
    return False
