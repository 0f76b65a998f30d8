"""The target of the extraction's tests: config, embedding, head and final norm in a folder, and no layers.

Each token's row of the head is one of the 1,120 vectors of four +-1 and four zeros, so two rows agree in
three places at most: after what the stand-in writes for the last layer (`tests.fakes.states`) the next token
has a probability of 1 to the sixth decimal. The norm's weights are powers of two, and two of
them are negative, so that states taken after the norm say other tokens.
"""

import itertools
import json
from pathlib import Path

import numpy as np

from tests.fakes.heads import SpokenHead

VOCAB = 500
HIDDEN = 8
NUM_LAYERS = 4


def _codes() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    codes = np.zeros((VOCAB, HIDDEN), dtype=np.float32)
    every = itertools.product(
        itertools.combinations(range(HIDDEN), 4), itertools.product((1.0, -1.0), repeat=4)
    )
    for token, (places, signs) in enumerate(itertools.islice(every, VOCAB)):
        codes[token, list(places)] = signs
    return codes


CODES = _codes()
TARGET = SpokenHead(
    head=64 * CODES,
    norm=np.array([-0.5, 4.0, 1.0, -0.25, 2.0, 8.0, 1.0, 0.5], dtype=np.float32),
    num_layers=NUM_LAYERS,
)


def make_target(folder: Path) -> Path:
    """Write the target to `folder` and return it (a few milliseconds)."""
    import torch
    from safetensors.torch import save_file

    weights = {
        "model.embed_tokens.weight": CODES,
        "model.norm.weight": TARGET.norm,
        "lm_head.weight": TARGET.head,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": NUM_LAYERS,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.tensor(one).to(torch.bfloat16) for name, one in weights.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
