"""A tiny target and drafts of it in the layout of speculators 0.9, written by hand."""

import json
from pathlib import Path
from typing import Any

HIDDEN, VOCAB, DRAFT_TOKENS, LAYERS = 16, 40, 8, (2, 3, 4, 6)
DRAFT_IDS = (0, 2, 3, 5, 9, 11, 20, 39)
_LAYER: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
}
TARGET_CONFIG: dict[str, Any] = _LAYER | {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS[-1],
    "pad_token_id": 2,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def target_tensors() -> dict[str, Any]:
    """What a draft takes of the target."""
    import torch

    generator = torch.Generator().manual_seed(7)
    embedding, head = torch.randn(2, VOCAB, HIDDEN, generator=generator).to(torch.bfloat16)
    return {
        "model.embed_tokens.weight": embedding.clone(),
        "lm_head.weight": head.clone(),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }


def write_target(folder: Path, tensors: dict[str, Any] | None = None) -> Path:
    """Write the target, as far as a draft needs it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TARGET_CONFIG))
    save_file(tensors or target_tensors(), folder / "model.safetensors")
    return folder


def draft_config(verifier: str, *, normed: bool = True) -> dict[str, Any]:
    """What training exports for this target; not `normed`, from a base draft of the EAGLE-3 authors' kind."""
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_TOKENS,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS[:-1]),
        "embed_requires_grad": False,
        "fc_norm": normed,
        "norm_before_fc": False,
        "norm_before_residual": normed,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": verifier},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": HIDDEN,
        "tie_word_embeddings": False,
        "transformer_layer_config": _LAYER
        | {
            "attention_bias": False,
            "dtype": "bfloat16",
            "mlp_bias": False,
            "num_aux_hidden_states": 3,
            "num_hidden_layers": 1,
            "pad_token_id": None,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
        },
    }


def draft_tensors(*, normed: bool = True) -> dict[str, Any]:
    """Random weights, norms that are still ones, the target's embedding, and the map of the vocabularies."""
    import torch

    generator = torch.Generator().manual_seed(0)
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "lm_head.weight": (DRAFT_TOKENS, HIDDEN),
        f"{mlp}.gate_proj.weight": (32, HIDDEN),
        f"{mlp}.up_proj.weight": (32, HIDDEN),
        f"{mlp}.down_proj.weight": (HIDDEN, 32),
        f"{attention}.q_proj.weight": (16, 2 * HIDDEN),
        f"{attention}.k_proj.weight": (8, 2 * HIDDEN),
        f"{attention}.v_proj.weight": (8, 2 * HIDDEN),
        f"{attention}.o_proj.weight": (HIDDEN, 16),
    }
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()
    }
    layer_norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    norms = ["norm", *(f"layers.0.{one}" for one in layer_norms)]
    for norm in [*norms, *((f"fc_norm.{k}" for k in range(3)) if normed else ())]:
        tensors[f"{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors["embed_tokens.weight"] = target_tensors()["model.embed_tokens.weight"]
    ids = torch.tensor(DRAFT_IDS)
    tensors["d2t"] = ids - torch.arange(DRAFT_TOKENS)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][ids] = True
    return tensors


def write_draft(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Write a draft."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
