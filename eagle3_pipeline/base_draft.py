"""The base draft: a pretrained draft, found locally or downloaded, and held against the target at once.

    base_draft/<fingerprint>/
        .lock             held while it is made
        manifest.json     facts: where the draft lies, its layers and vocabulary, its content's fingerprint

It is made while samples are. Whatever would keep the training from starting with it is said here, from its
config and the names and shapes of its tensors, before hidden states are extracted for its layers.
"""

from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import BadInput, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.model_folder import (
    content_of_model,
    is_whole,
    language_part,
    pickles_among,
    read_config,
)
from eagle3_pipeline.model_place import fetch, make_model
from eagle3_pipeline.training.base_config import aux_layers, require_layers
from eagle3_pipeline.training.base_config import read_config as read_draft_config

# Its tokenizer and its chat template are the target's.
_BESIDE_WEIGHTS = ("config.json",)


def make_base_draft(lineage: Lineage) -> Manifest:
    """Find or download the pretrained draft and hold it against the target and `extraction.layers`.

    Raises BadInput, SourceUnreachable and NotEnoughRoom.
    """
    settings = lineage.recipe.base_draft
    if settings is None:
        raise RecipeError("base_draft: the recipe names none, so there is nothing to fetch")

    def make(place: Place, before: Manifest | None) -> Manifest:
        folder, facts = fetch(settings.path, settings.hub_id, settings.revision, before, _BESIDE_WEIGHTS)
        _require_draft(folder)
        return place.finish([], {**_describe(lineage, folder), **facts})

    manifest = make_model(lineage.base_draft(), make)
    require_base_layers(lineage)
    return manifest


def require_base_layers(lineage: Lineage) -> None:
    """Raise BadInput where the base draft, if there is one, draws on other layers than are extracted."""
    if (base := lineage.base_draft_path()) is None:
        return
    assert lineage.recipe.base_draft is not None
    depth = int(lineage.target_model().require().facts["num_layers"])
    layers = lineage.recipe.extraction.layers[:-1]
    require_layers(base, depth, layers, lineage.recipe.base_draft.layers_counted)


def _require_draft(folder: Path) -> None:
    if is_whole(folder):
        return
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if any(name.endswith(".safetensors") for name in names):
        raise BadInput(
            f"{folder} is no draft, or not whole: expected config.json and every *.safetensors that its "
            "index names. Copy or download it again."
        )
    raise BadInput(f"{folder} is no draft: it has no *.safetensors{pickles_among(names)}")


def _describe(lineage: Lineage, folder: Path) -> dict[str, Any]:
    """Path, content and shape of the draft; raises BadInput where it does not fit the target."""
    from eagle3_pipeline.training.warm_start import require_base_fits
    from eagle3_pipeline.vocabulary.base_mapping import read_base_mapping

    assert lineage.recipe.base_draft is not None
    target = language_part(read_config(lineage.model_path()))
    config = read_draft_config(folder)
    counted = lineage.recipe.base_draft.layers_counted
    layers = aux_layers(folder, config, int(target["num_hidden_layers"]), counted)
    d2t, _ = read_base_mapping(folder, int(target["vocab_size"]))
    require_base_fits(folder, target, layers, len(d2t))
    return {
        "model_path": str(folder),
        "model_fingerprint": content_of_model(
            folder, _BESIDE_WEIGHTS if lineage.recipe.base_draft.hub_id else None
        ),
        "layers": list(layers),
        "draft_tokens": len(d2t),
    }
