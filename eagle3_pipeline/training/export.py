"""The finished draft as vLLM and speculators load it.

    draft/
        config.json         aux layer ids, norm flags and draft vocabulary size, all explicit
        model.safetensors   bfloat16; embed_tokens, fc, layers.0.*, norm, lm_head, d2t, t2d

d2t and t2d are left out where the draft has the target's whole vocabulary: both loaders then expect none.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_pipeline.durable_files import fsync_file, fsync_folder
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.tensor_file import write_tensors

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
# vLLM takes another default than speculators for some of them, and serves on without a word.
EXPLICIT = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
)


def export_draft(model: Any, folder: Path, aux_layers: tuple[int, ...]) -> list[Path]:
    """Write the draft to `folder`, read it back and compare; returns its files.

    Raises DamagedFile, also where its config names other layers than the `aux_layers` it was trained on.
    """
    partial = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = export_tensors(model)
    # Without metadata.format transformers refuses a safetensors file.
    write_tensors(tensors, partial / WEIGHTS_NAME, metadata={"format": "pt"})
    model.config.architectures = ["Eagle3Speculator"]
    model.config.save_pretrained(partial)
    _make_explicit(partial / CONFIG_NAME, model.config)
    _require_layers(partial / CONFIG_NAME, aux_layers)
    _compare(tensors, load_file(partial / WEIGHTS_NAME), partial)
    for path in partial.iterdir():
        fsync_file(path)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    fsync_folder(folder.parent)
    return sorted(path for path in folder.iterdir() if path.is_file())


def export_tensors(model: Any) -> dict[str, Tensor]:
    """All tensors of the served draft by name: floats in bfloat16, the vocabulary map as it is.

    What is so on the CPU already, as the target's embedding, is no copy.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not name.startswith("verifier_"):
            dtype = torch.bfloat16 if value.dtype.is_floating_point else value.dtype
            tensors[name] = value.detach().to("cpu", dtype).contiguous()
    return tensors


def _make_explicit(path: Path, config: Any) -> None:
    """Write the settings on which acceptance depends even where they are the default of somebody's code."""
    values = json.loads(path.read_text())
    values.update({name: getattr(config, name) for name in EXPLICIT})
    # speculators has its config class copied beside the weights as code to trust; nothing served needs it.
    values.pop("auto_map", None)
    path.with_name("config.py").unlink(missing_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")


def _require_layers(path: Path, aux_layers: tuple[int, ...]) -> None:
    """A server feeds the draft what the config names: from other layers it accepts next to nothing."""
    found = json.loads(path.read_text())["eagle_aux_hidden_state_layer_ids"]
    if found != list(aux_layers):
        raise DamagedFile(
            f"the draft's config names the layers {found}, it was trained on {list(aux_layers)}. Which "
            "version of speculators wrote it? Install the one of the lock file and train again."
        )


def _compare(written: dict[str, Tensor], read: dict[str, Tensor], folder: Path) -> None:
    for name, tensor in written.items():
        # By its extremes, which no number that is none escapes: isfinite makes copies.
        if tensor.dtype.is_floating_point and not all(one.isfinite() for one in tensor.aminmax()):
            raise DamagedFile(
                f"{name} of the trained draft is not finite. Lower training.learning_rate and train again."
            )
        if name not in read or not torch.equal(tensor, read[name]):
            raise DamagedFile(f"{folder / WEIGHTS_NAME}: {name} is not what was written. Is the disk sound?")
