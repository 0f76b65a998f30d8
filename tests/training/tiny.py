"""A draft of 30,000 parameters, invented samples and a plan for it: training steps of milliseconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3_pipeline.target_weights import TargetWeights
from eagle3_pipeline.training.batches import Split, split_samples
from eagle3_pipeline.training.draft import layer_config, new_draft, speculator_config
from eagle3_pipeline.training.plan import TrainingPlan

VOCAB, HIDDEN, DRAFT = 97, 32, 40
LAYERS = (2, 5, 7, 9)
JUDGES = ("sample-1", "sample-4")


class Memory:
    """Samples in memory, as a SampleSource."""

    def __init__(self, samples: Sequence[dict[str, torch.Tensor]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def prefetch(self, indices: Sequence[int]) -> None:
        pass

    def loss_mask(self, index: int) -> torch.Tensor:
        return self.samples[index]["loss_mask"]

    def read(self, index: int) -> Mapping[str, torch.Tensor]:
        return self.samples[index]

    def name(self, index: int) -> str:
        return f"sample-{index}"


def sample(tokens: int, prompt: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One sample with random states, of which the target wrote what follows `prompt`."""
    return {
        "hidden_states": torch.randn(tokens, 4, HIDDEN, generator=generator).to(torch.bfloat16),
        "token_ids": torch.randint(VOCAB, (tokens,), generator=generator),
        "loss_mask": torch.arange(tokens) >= prompt,
    }


def memory(sizes: Sequence[tuple[int, int]]) -> Memory:
    """Samples of (tokens, prompt tokens)."""
    generator = torch.Generator().manual_seed(0)
    return Memory([sample(tokens, prompt, generator) for tokens, prompt in sizes])


def target_config(kind: str = "llama") -> dict[str, Any]:
    """The config of the invented target."""
    return {
        "model_type": kind,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": LAYERS[-1],
        "head_dim": 8,
        "vocab_size": VOCAB,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
    }


def target_weights(kind: str = "llama") -> TargetWeights:
    """Its embedding, head and norm."""
    generator = torch.Generator().manual_seed(1)
    return TargetWeights(
        torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3,
        torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3,
        torch.rand(HIDDEN, generator=generator) + 0.5,
        target_config(kind),
        ("LlamaForCausalLM",),
    )


def draft_map() -> tuple[torch.Tensor, torch.Tensor]:
    """d2t and t2d of a random vocabulary."""
    chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:DRAFT].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(DRAFT), t2d


def draft(
    kind: str = "llama",
    *,
    train_head: bool = True,
    window: int | None = None,
    intermediate_size: int | None = None,
    **norms: bool,
) -> Any:
    """A new draft of the invented target."""
    weights = target_weights(kind)
    config = speculator_config(
        layer_config(weights.config, 3, intermediate_size=intermediate_size, attention_window=window),
        weights,
        target_name="somebody/tiny",
        aux_layers=LAYERS[:-1],
        draft_tokens=DRAFT,
        speculative_tokens=3,
        norms=norms,
    )
    return new_draft(config, weights, *draft_map(), seed=0, train_head=train_head)


def plan(folder: Path, **changes: Any) -> TrainingPlan:
    """A plan of two epochs."""
    values: dict[str, Any] = {
        "folder": str(folder),
        "target": "",
        "target_name": "somebody/tiny",
        "shards": (),
        "samples": None,
        "turn": 0,
        "passes": 1,
        "vocabulary": "",
        "base_draft": None,
        "layers": LAYERS,
        "model_fingerprint": "m" * 64,
        "devices": (),
        "processes": 1,
        "validation": JUDGES,
        "epochs": 2,
        "learning_rate": 1e-2,
        "rates": {"fusion": 1.0, "layer": 1.0, "norm": 1.0, "head": 1.0},
        "warmup_share": 0.1,
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "pull_to_start": 0.0,
        "max_gradient_norm": 1.0,
        "tokens_per_step": 40,
        "accumulation": 1,
        "loss": "kl_div",
        "test_time_steps": 3,
        "step_decay": 0.8,
        "train_head": True,
        "per_layer_norm": True,
        "norm_output": False,
        "norm_before_residual": True,
        "attention_window": None,
        "intermediate_size": None,
        "patience": None,
        "checkpoint_every_s": 3600.0,
        "seed": 0,
        "keep_free_bytes": 0,
        "fingerprint": "f" * 64,
    }
    return TrainingPlan(**{**values, **changes})


def split(source: Memory) -> Split:
    """The split that `plan` makes."""
    return split_samples(source, JUDGES)
