"""A tiny EAGLE-3 draft for the walk of tests/models.py, laid out by hand as well, that vLLM serves as it is.

Its one layer copies the state of the newest token (attention to itself) and, with `looks_back`, the bit of
the token LOOK_BACK before it: then it is right nearly always. Without, it knows the state and not the bit:
right about every other time. Both are drafts of a known quality, to test measuring with.
"""

import json
from pathlib import Path
from typing import Any

from tests.models import HEAD_SIZE, LOOK_BACK

_HEADS = 4  # 0 and 1 move the code (64 dimensions: a hidden size of up to 83), 2 is idle, 3 looks back


def make_draft(
    folder: Path, target: Path, *, looks_back: bool = True, layers: tuple[int, int, int] = (1, 2, 3)
) -> Path:
    """Write the draft of the Llama in `target` (made by `make_llama`) to `folder` and return it."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((target / "config.json").read_text())
    hidden, heads = config["hidden_size"], _HEADS
    generator = torch.Generator().manual_seed(1)
    weights: dict[str, Any] = {
        "lm_head.weight": load_file(target / "model.safetensors")["lm_head.weight"].float(),
        "fc.weight": torch.randn(hidden, 3 * hidden, generator=generator) * 0.1,
        "norm.weight": torch.ones(hidden),
        **_attention(hidden, heads, looks_back),
        "midlayer.mlp.gate_proj.weight": torch.zeros(hidden, hidden),
        "midlayer.mlp.up_proj.weight": torch.zeros(hidden, hidden),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, hidden),
    }
    # The residual starts with next to nothing of the hidden state, which from the second proposal on is the
    # draft's own and carries the state of the token before.
    for norm, size in (("hidden_norm", 0.01), ("input_layernorm", 1.0), ("post_attention_layernorm", 1.0)):
        weights[f"midlayer.{norm}.weight"] = torch.full((hidden,), size)
    folder.mkdir(parents=True, exist_ok=True)
    saved = {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    draft = {
        **{
            key: config[key]
            for key in ("max_position_embeddings", "rms_norm_eps", "vocab_size", "hidden_act")
        },
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD_SIZE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "norm_before_residual": True,
        "draft_vocab_size": config["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }
    (folder / "config.json").write_text(json.dumps(draft, indent=2))
    return folder


def _attention(hidden: int, heads: int, looks_back: bool) -> dict[str, Any]:
    """Heads 0 and 1 look at their own place and move the code; the last one looks back and moves the bit."""
    import torch

    half, code_size = HEAD_SIZE // 2, (hidden - 3) * 4 // 5
    frequencies = 1.0 / 10000.0 ** (torch.arange(half) / half)
    sharpness = torch.where(torch.arange(half) < 6, 9.0, 0.0)
    query, key, value = (torch.zeros(heads * HEAD_SIZE, 2 * hidden) for _ in range(3))
    output = torch.zeros(hidden, heads * HEAD_SIZE)
    for head in range(heads):
        first, distance = head * HEAD_SIZE, LOOK_BACK if head == heads - 1 else 0
        key[first : first + half, 0] = sharpness
        query[first : first + half, 0] = sharpness * torch.cos(distance * frequencies)
        query[first + half : first + HEAD_SIZE, 0] = -sharpness * torch.sin(distance * frequencies)
    for index in range(code_size):
        value[index, 3 + index] = output[3 + index, index] = 1
    last = (heads - 1) * HEAD_SIZE
    value[last, 1] = 1
    output[2, last] = 2 if looks_back else 0
    projections = {"q": query, "k": key, "v": value, "o": output}
    return {f"midlayer.self_attn.{one}_proj.weight": weight for one, weight in projections.items()}
