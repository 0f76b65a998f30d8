"""A Llama of random weights on transformers: unsure of its next token, like a real target, and fast.

Its final norm's weights differ much, so that states before and after the norm say other tokens; each layer
changes the residual stream as much as the layers of a small real model do.
"""

from dataclasses import dataclass
from typing import Any

import torch

from eagle3_pipeline.target_weights import TargetWeights

VOCAB, HIDDEN, LAYERS = 300, 48, 8


@dataclass(frozen=True)
class Recorded:
    """A sample: ids and mask `[T]`, all hidden states `[T, layers + 1, H]`, the last before the norm."""

    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: torch.Tensor


class NoisyLlama:
    """The model in bfloat16; everything follows from the seed."""

    def __init__(self, seed: int = 0) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            initializer_range=0.3,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: Any = LlamaForCausalLM(self.config).to(torch.bfloat16).eval()
            with torch.no_grad():
                self.model.model.norm.weight.copy_(torch.randn(HIDDEN).exp())
                self.model.model.embed_tokens.weight.normal_(std=0.5)
                self.model.lm_head.weight.normal_(std=0.25)

    @property
    def weights(self) -> TargetWeights:
        """What the pipeline reads of it."""
        state = self.model.state_dict()
        return TargetWeights(
            embedding=state["model.embed_tokens.weight"],
            head=state["lm_head.weight"],
            norm=state["model.norm.weight"],
            config=self.config.to_dict(),
            architectures=("LlamaForCausalLM",),
        )

    @torch.no_grad()
    def record(
        self, samples: int, *, prompt: int, completion: int, seed: int = 0, **sampling: Any
    ) -> list[Recorded]:
        """Random prompts, answered by the model as transformers samples, and the states of the whole."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            prompts = torch.randint(VOCAB, (samples, prompt))
            ids = self.model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=completion,
                pad_token_id=0,
                **sampling,
            )
        caught: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        out = self.model.model(ids, output_hidden_states=True)
        hook.remove()
        states = torch.stack([*out.hidden_states[:-1], caught[0]], dim=2)
        mask = torch.arange(prompt + completion) >= prompt
        return [Recorded(one, mask, its_states) for one, its_states in zip(ids, states, strict=True)]
