"""What the passes of a training step keep for their backward, in bytes, from the shape of the draft.

Counted are numbers per row of a batch; names as in forward.py.
"""

from typing import Any

from eagle3_pipeline.training.draft import FROZEN
from eagle3_pipeline.training.flash_cpu import PIECE


class StepShape:
    """Sizes from the model's config; the model may be on the meta device."""

    def __init__(self, model: Any) -> None:
        layer = model.config.transformer_layer_config
        self.hidden = int(layer.hidden_size)
        self.aux = int(model.fc.weight.shape[1]) // self.hidden
        self.is_normed = model.input_norm is not None or model.fc_norm is not None
        self.head_dim = int(layer.head_dim)
        self.heads = int(layer.num_attention_heads)
        self.queries = self.heads * self.head_dim
        self.keys = int(layer.num_key_value_heads) * self.head_dim
        self.inner = int(layer.intermediate_size)
        self.tokens = int(model.config.draft_vocab_size)
        # Cast once per batch, with a gradient of the same size that grows from step to step.
        self.casts: int = 2 * sum(
            one.numel() for name, one in model.named_parameters() if name not in FROZEN and one.ndim == 2
        )

    def batch(self, rows: int, supervised: int) -> int:
        """States and verifier's states in bfloat16; ids and masks are next to nothing."""
        return 2 * self.hidden * (self.aux * rows + supervised)

    def pass_(self, rows: int, supervised: int, steps: int, loss: str) -> int:
        """What is kept until the backward has begun, and what it begins with."""
        kept = 2 * (rows * self._per_row() + supervised * sum(self._per_query(step) for step in range(steps)))
        # Logits of each step, as gradients; the verifier's probabilities in float32, or its scores.
        vocabulary = 2 * supervised * self.tokens * (steps + (2 if loss == "kl_div" else 1))
        logs = 4 * supervised * self.heads * steps
        begun = 2 * supervised * (4 * self.inner + 3 * self.hidden)
        return 2 * self.casts + kept + vocabulary + logs + begun

    def scores(self, longest: int) -> int:
        """What the backward of attention writes down of a piece: thrice in float32, once in bfloat16."""
        return 14 * self.heads * min(PIECE, longest) * longest

    def _per_row(self) -> int:
        """Numbers that step 0 keeps of each row."""
        fused = 2 * self.aux * self.hidden if self.is_normed else 0  # unit and normed states of the layers
        normed = 4 * self.hidden  # unit and normed, of embedding and state
        return fused + normed + (self.queries + 2 * self.keys) + 3 * self.keys + 2 * self.head_dim

    def _per_query(self, step: int) -> int:
        """Numbers that a step keeps of each supervised row."""
        attention = 2 * self.queries + 2 * self.head_dim + self.hidden
        if step:  # the row's own link of the chain, and the unit state that it comes from
            attention += self.queries + 3 * self.keys + self.hidden
        mlp = 2 * self.hidden + 4 * self.inner
        return attention + mlp + 2 * self.hidden  # the last: unit and normed state before the head
