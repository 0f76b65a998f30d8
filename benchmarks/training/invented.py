"""A training with nothing behind it but shapes: random states, and the three tensors of a target.

Speed and memory of a training depend on shapes and lengths, not on what is learnt. `make_plan` writes below
one folder:

    target/       config.json and model.safetensors with embedding, head and final norm
    states/       one shard of samples, a quarter of each a prompt
    vocabulary/   the first tokens of the target
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3_pipeline.manifest import Place
from eagle3_pipeline.recipe.training import Training
from eagle3_pipeline.shards.format import ShardLayout
from eagle3_pipeline.shards.writer import ShardWriter
from eagle3_pipeline.tensor_file import write_tensors
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.vocabulary.mapping import VOCABULARY_NAME, write_mapping

_PART_BYTES = 2 << 30
_PROMPT_SHARE = 0.25


@dataclass(frozen=True)
class Shape:
    """What of a target decides the size of its draft."""

    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    draft_tokens: int
    layers: int

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers of the states, as the recipes choose them."""
        return (2, self.layers // 2, self.layers - 3, self.layers)


SHAPES = {
    # HuggingFaceTB/SmolLM2-135M-Instruct, and the draft vocabulary of the demo
    "smollm2": Shape(576, 9, 3, 64, 1536, 49_152, 4_096, 30),
    # meta-llama/Llama-3.1-8B-Instruct, and the vocabulary of the published drafts
    "llama-8b": Shape(4096, 32, 8, 128, 14_336, 128_256, 32_000, 32),
    # moonshotai/Kimi-K2-Instruct; the draft has heads of 128 in place of MLA
    "kimi-k2": Shape(7168, 56, 7, 128, 18_432, 163_840, 32_000, 61),
}


def make_plan(
    folder: Path,
    shape: Shape,
    training: Training,
    *,
    samples: int,
    tokens: int,
    devices: tuple[str, ...] = (),
) -> TrainingPlan:
    """Write a target, a vocabulary and `samples` samples of `tokens` tokens each; plan a training on them."""
    target = write_target(folder / "target", shape)
    states = write_states(folder / "states", shape, samples, tokens)
    vocabulary = folder / "vocabulary"
    vocabulary.mkdir()
    t2d = torch.arange(shape.vocabulary) < shape.draft_tokens
    write_mapping(vocabulary / VOCABULARY_NAME, torch.zeros(shape.draft_tokens, dtype=torch.int64), t2d)
    return TrainingPlan(
        folder=str(folder / "training"),
        target=str(target),
        target_name="invented",
        shards=(str(states),),
        samples=None,
        turn=0,
        passes=1,
        vocabulary=str(vocabulary / VOCABULARY_NAME),
        base_draft=None,
        layers=shape.layer_ids,
        model_fingerprint="0" * 64,
        devices=devices,
        processes=1,
        validation=("0",),
        keep_free_bytes=0,
        fingerprint="0" * 64,
        **training.model_dump(exclude={"draft_layers", "sweep"}),
    )


def config_of(shape: Shape) -> dict[str, Any]:
    """The config of a Llama of this shape."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def write_target(folder: Path, shape: Shape) -> Path:
    """A folder that a draft can be made from; nobody could serve it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n")
    generator = torch.Generator().manual_seed(0)

    def table() -> torch.Tensor:
        empty = torch.empty(shape.vocabulary, shape.hidden, dtype=torch.bfloat16)
        return empty.normal_(std=0.02, generator=generator)

    tensors = {
        "model.embed_tokens.weight": table(),
        "lm_head.weight": table(),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
    }
    write_tensors(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_states(folder: Path, shape: Shape, samples: int, tokens: int) -> Path:
    """One complete shard of random states."""
    layout = ShardLayout(shape.layer_ids, shape.hidden, "0" * 64)
    place = Place(folder, "hidden_state_shards", "0" * 64, {})
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(folder, layout, _PART_BYTES, place.fingerprint) as writer:
        for number in range(samples):
            states = torch.empty(tokens, len(layout.layer_ids), shape.hidden, dtype=torch.bfloat16)
            states.normal_(generator=generator)
            ids = torch.randint(shape.vocabulary, (tokens,), generator=generator)
            writer.add(f"{number}-t0", states, ids, torch.arange(tokens) >= _PROMPT_SHARE * tokens)
        place.finish(writer.complete(), {"shape": asdict(shape)})
        writer.close(finished=True)
    return folder
