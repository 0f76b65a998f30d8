"""The draft once more, in the layout of the EAGLE-3 authors, which SGLang and SpecForge load.

    eagle3/
        config.json         flat: one Llama layer, draft_vocab_size, eagle_config
        model.safetensors   bfloat16: fc, midlayer.*, norm, lm_head; d2t and t2d as in the draft

The same values as in the draft's own folder (training/export.py), bit for bit; what differs:

    layers.0.*       is midlayer.*
    embed_tokens     is left out: SGLang and SpecForge take the target's, whatever is there
    layer ids        in eagle_config by what leaves a layer (one less), as SGLang and SpecForge count them;
                     beside the rest by what enters it, where vLLM looks first
    rotary settings  as rope_theta and rope_scaling (transformers 4), and as rope_parameters (transformers 5)

The layout has one architecture. What else a draft may have stands in none of its keys, or in keys that some
versions of SGLang and SpecForge pass over in silence: such a draft would be served, and next to never
accepted. So it is not written in this layout.

Sources: SafeAILab/EAGLE, eagle/model/cnets.py. sgl-project/sglang, srt/models/llama_eagle3.py; pull requests
24663 and 25454. sgl-project/SpecForge, specforge/modeling/draft/llama3_eagle.py; pull request 568.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.durable_files import full_disk_named, require_free_bytes, write_json
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.model_folder import weight_files
from eagle3_pipeline.recipe.layers import to_output_of_layer
from eagle3_pipeline.release.borrowed import first_difference, target_of
from eagle3_pipeline.release.draft_tensors import EMBEDDING
from eagle3_pipeline.training.base_config import layer_of, norm_flags, read_config
from eagle3_pipeline.training.base_tensors import RENAMED, list_tensors

if TYPE_CHECKING:
    import torch

_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYERS = 3  # that SpecForge, and SGLang until mid 2026, join
# What enters layer 2 leaves layer 1: ids that begin with 1 are all that every version of SGLang reads alike.
_FIRST_LAYER = 2
_UNKNOWN = "which neither SGLang nor SpecForge knows"
_UNLESS_NEW = "which SGLang and SpecForge know since May 2026 only, and passed over in silence before"
_NORMS = {
    "norm_before_residual": f"the draft's layer adds to the normed state (norm_before_residual), {_UNKNOWN}",
    "norm_before_fc": f"the joined states are normed (norm_before_fc), {_UNKNOWN}",
    "fc_norm": f"the state of each layer is normed (fc_norm), {_UNLESS_NEW}",
    "norm_output": f"the draft's output is fed back normed (norm_output), {_UNLESS_NEW}",
}
_PARTS = (
    *(f"layers.0.self_attn.{one}_proj.weight" for one in "qkvo"),
    *(f"layers.0.mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
    *(f"layers.0.{one}.weight" for one in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    *("fc.weight", "norm.weight", "lm_head.weight", EMBEDDING),
)
_ROOM = "Free some space, then materialise released_draft again."


def write_eagle3_layout(draft: Path, target: Path, folder: Path, verifier: str) -> list[Path] | str:
    """Write the draft in `draft` (the released layout, verified) to `folder`; returns its two files.

    Where the layout cannot express the draft nothing is written, and the return is why, as the end of a
    sentence ("there is no eagle3/, because ..."). `target` is the target's folder, `verifier` the name under
    which the config speaks of it: its public id, or the name of its folder, never a path.

    What a kill leaves is written over by the next call. Raises NotEnoughRoom, MissingInput (no target) and
    DamagedFile (what is read back is not what was written); nothing is left then.
    """
    config = read_config(draft)
    if reasons := [*_reasons(config)] or [*_reasons_in_tensors(draft, target)]:
        return "; ".join(reasons)
    tensors = _renamed_tensors(draft)
    size = sum(one.numel() * one.element_size() for one in tensors.values())
    require_free_bytes(folder, size, f"{folder.name}/ of the release", _ROOM)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with full_disk_named(folder, _ROOM):
            return _write(tensors, eagle3_config(config, verifier), folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def eagle3_config(config: Mapping[str, Any], verifier: str) -> dict[str, Any]:
    """The flat config of a draft with this one; every setting of its layer is in it."""
    layer = dict(layer_of(config))
    rope = layer["rope_parameters"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    layers = config[_IDS]
    return {
        **layer,
        "architectures": ["LlamaForCausalLMEagle3"],
        "verifier": verifier,
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
        **norm_flags(config),
        _IDS: layers,
        "eagle_config": {_IDS: list(to_output_of_layer(layers)), "use_aux_hidden_state": True},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "torch_dtype": "bfloat16",  # transformers 4
        "dtype": "bfloat16",
    }


def _reasons(config: Mapping[str, Any]) -> Iterator[str]:
    layer, layers = layer_of(config), config[_IDS]
    if (kind := layer.get("model_type")) != "llama":
        yield f"the draft's layer is of the kind {kind}, the layout has Llama's"
    yield from (_NORMS[flag] for flag, is_on in norm_flags(config).items() if is_on)
    if "sliding_attention" in (layer.get("layer_types") or ()):
        yield f"the draft looks back {layer.get('sliding_window')} tokens, which no key of the layout says"
    if len(layers) != _LAYERS:
        yield f"the draft draws on {len(layers)} layers, SpecForge and older versions of SGLang on {_LAYERS}"
    if layers[0] != _FIRST_LAYER:
        yield (
            f"the draft draws on what enters the layers {layers}, and where the first is not {_FIRST_LAYER} "
            "(extraction.layers), older and newer versions of SGLang count them in two ways"
        )


def _reasons_in_tensors(draft: Path, target: Path) -> Iterator[str]:
    tensors = list_tensors(draft)
    if strange := sorted(set(tensors) - set(_PARTS)):
        yield f"the draft has tensors for which the layout has no place: {', '.join(strange)}"
    if EMBEDDING in tensors and first_difference(tensors[EMBEDDING], target_of(target).embedding) is not None:
        yield "the draft's embedding is not the target's, and SGLang and SpecForge take the target's"


def _renamed_tensors(draft: Path) -> "dict[str, torch.Tensor]":
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(draft):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dict
                if name != EMBEDDING:
                    tensors[_authors_name(name)] = weights.get_tensor(name)
    return tensors


def _authors_name(name: str) -> str:
    for authors, ours in RENAMED:
        if name.startswith(ours):
            return authors + name.removeprefix(ours)
    return name


def _write(tensors: "dict[str, torch.Tensor]", config: dict[str, Any], folder: Path) -> list[Path]:
    """Write both files durably, read them back and compare."""
    import torch
    from safetensors.torch import load_file

    from eagle3_pipeline.tensor_file import write_tensors

    files = [folder / "config.json", folder / "model.safetensors"]
    write_json(files[0], config)
    # Without metadata.format transformers refuses a safetensors file.
    write_tensors(tensors, files[1], metadata={"format": "pt"})
    read = load_file(files[1])
    same = read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in read)
    if not same or json.loads(files[0].read_text()) != config:
        raise DamagedFile(
            f"{folder} is not what was written. Check the disk, then materialise released_draft again."
        )
    return files
