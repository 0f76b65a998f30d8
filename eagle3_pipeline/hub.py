"""Models of the Hugging Face hub, in its local cache: at one commit, only what is needed, if it fits.

    weights       those that the index names; without an index model.safetensors alone, where there is one,
                  and else every *.safetensors; of the top folder only
    other files   those of the caller's patterns, at any depth
    never         pickles (*.bin, *.pt, ...): they can run code when they are read

A branch is looked up once, and everything is fetched at the commit that it stood for. What is whole in the
cache stays: a download that was interrupted goes on with the files that are not.
"""

import fnmatch
import glob
import json
import logging
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import full_disk_named, require_free_bytes
from eagle3_pipeline.errors import BadInput, Eagle3Error, SourceUnreachable
from eagle3_pipeline.model_folder import INDEX_NAME, is_whole, pickles_among

logger = logging.getLogger(__name__)

_ONE_FILE = "model.safetensors"
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
            wanted = _wanted(hub_id, commit, sizes, beside)
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


def _wanted(hub_id: str, commit: str, sizes: dict[str, int], beside: tuple[str, ...]) -> list[str]:
    """Names of the files to have; raises BadInput where there are no weights, or the index names others."""
    from huggingface_hub import hf_hub_download

    top = [name for name in sizes if fnmatch.fnmatch(name, "*.safetensors") and "/" not in name]
    if INDEX_NAME in sizes:
        index = json.loads(Path(hf_hub_download(hub_id, INDEX_NAME, revision=commit)).read_text())
        weights = {INDEX_NAME, *index["weight_map"].values()}
    else:
        weights = {_ONE_FILE} if _ONE_FILE in top else set(top)
    if missing := sorted(weights - set(sizes)):
        raise BadInput(
            f"{hub_id} at {commit} lacks {', '.join(missing[:3])}, which its own {INDEX_NAME} names. Take "
            "another revision of it, or name a local folder with path in the recipe."
        )
    if not weights:
        raise BadInput(f"{hub_id} at {commit} has no *.safetensors{pickles_among(sizes)}")
    others = {name for name in sizes if any(fnmatch.fnmatch(name, pattern) for pattern in beside)}
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
    """The model in the cache if it is whole there."""
    from huggingface_hub import snapshot_download

    try:
        # Where it knows the list of files, it raises when one of these is missing.
        folder = Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=list(beside), local_files_only=True)
        )
    except Exception:  # as above: whatever it is, the model is not there
        return None
    return folder if is_whole(folder) else None


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
