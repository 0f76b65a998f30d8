"""Test-time training of the draft over a packed batch: the same numbers as speculators' forward, less work.

What is left out, in the order of what it saves: attention between samples; rows that nothing is
proposed from (they only give keys and values of step 0); verifier and draft logits of such rows; the
embedding's half of the first projections in steps after the first, which is that of step 0 one row further.

R rows, S supervised rows, N query heads, M key heads, D width of a head, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_pipeline.training.attention import Context, attend, make_context
from eagle3_pipeline.training.batches import Batch
from eagle3_pipeline.training.draft import attention_window
from eagle3_pipeline.training.geometry import Geometry, lay_out
from eagle3_pipeline.training.loss import REDUCTION_EPSILON, head_and_loss, make_loss, verifier_scores
from eagle3_pipeline.training.rms_norm import rms_norm


@dataclass(frozen=True)
class Step:
    """What one test-time-training step gave."""

    loss: Tensor
    """Scalar, float32: sum over the step's rows, not yet decayed."""
    rows: Tensor
    """`[n]`: which supervised rows (0..S-1) the step proposes from."""
    proposals: Tensor
    """`[n]`: the draft's most probable token, in the draft's ids; it is meant for label `rows + step`."""

    @property
    def mean(self) -> Tensor:
        """The loss of a row, as speculators' masked mean has it."""
        return self.loss / (len(self.rows) + REDUCTION_EPSILON)


def train_forward(
    model: Any, batch: Batch, steps: int, dtype: torch.dtype = torch.bfloat16, loss: str = "kl_div"
) -> list[Step]:
    """All test-time-training steps of one batch; matrix products run in `dtype`, parameters keep theirs.

    `loss` is one of speculators' names.
    """
    geometry = lay_out(batch, steps)
    pass_ = _Pass(model, batch, geometry, dtype)
    with torch.no_grad():
        epsilon = model.config.transformer_layer_config.rms_norm_eps
        head = model.verifier_lm_head.weight.to(dtype)
        criterion = make_loss(
            loss, verifier_scores(batch.verifier, model.verifier_norm.weight, epsilon, head)
        )
    results = []
    for step, states in enumerate(pass_.states(steps)):
        rows = geometry.rows[step]
        hidden = states if len(rows) == len(states) else states.index_select(0, rows)
        if not model.config.norm_output:  # with it, states are normed already
            hidden = pass_.norm(hidden, model.norm)
        total, proposals = head_and_loss(hidden, pass_.head, rows + step, criterion)
        results.append(Step(total, rows, proposals))
    return results


class _Pass:
    """The weights of one batch's pass, cast once, and the geometry of its rows."""

    def __init__(self, model: Any, batch: Batch, geometry: Geometry, dtype: torch.dtype) -> None:
        self._model = model
        self._batch = batch
        self._geometry = geometry
        self._dtype = dtype
        self._layer = model.layers[0]
        attention = self._layer.self_attn
        self._head_dim: int = attention.head_dim
        self._epsilon: float = model.config.transformer_layer_config.rms_norm_eps
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        together = torch.cat([one.weight for one in projections]).to(dtype)
        hidden = together.shape[1] // 2
        self._for_embeds, self._for_states = together[:, :hidden], together[:, hidden:]
        self._bias = (
            torch.cat([one.bias for one in projections]).to(dtype)
            if attention.q_proj.bias is not None
            else None
        )
        self._sizes = [len(one.weight) for one in projections]
        self._out = attention.o_proj.weight.to(dtype)
        self._out_bias = attention.o_proj.bias.to(dtype) if attention.o_proj.bias is not None else None
        mlp = self._layer.mlp
        self._gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype)
        self._down = mlp.down_proj.weight.to(dtype)
        self.head: Tensor = model.lm_head.weight.to(dtype)
        self._activation: Callable[[Tensor], Tensor] = mlp.act_fn

    def norm(self, hidden: Tensor, module: Any) -> Tensor:
        """RMS norm over the last dimension, in the pass's dtype."""
        return rms_norm(hidden, module.weight.to(self._dtype), self._epsilon)

    def states(self, steps: int) -> Any:
        """Yield the layer's output `[S, H]` of each step; each feeds the next."""
        batch, layer = self._batch, self._layer
        at = batch.supervised
        hidden = self._fuse()
        embeds = F.linear(self.norm(self._embed(), layer.input_layernorm), self._for_embeds, self._bias)
        angles = self._angles(steps)
        contexts = self._contexts(steps)
        normed = self.norm(hidden, layer.hidden_norm)
        keys, values = self._keys(embeds, normed, angles)
        hidden, normed = hidden.index_select(0, at), normed.index_select(0, at)
        chain: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            if step:
                normed = self.norm(hidden, layer.hidden_norm)
            place = (at + step).clamp_(max=len(batch.tokens) - 1)
            query, link = self._project(embeds, normed, place, angles, step)
            if link is not None:
                chain.append(link)
            mixed = attend(query, keys, values, chain, contexts[step])
            residual = normed if layer.norm_before_residual else hidden
            hidden = self._finish(mixed, residual)
            if self._model.config.norm_output:
                hidden = self.norm(hidden, self._model.norm)
            yield hidden

    def _contexts(self, steps: int) -> list[Context]:
        """The context of each step; a window moves on with it."""
        window = attention_window(self._model.config.transformer_layer_config)
        device = self._batch.tokens.device
        made = [
            make_context(self._geometry.runs, window, step, self._dtype, device)
            for step in range(steps if window is not None else 1)
        ]
        return made if window is not None else made * steps

    def _fuse(self) -> Tensor:
        """The aux layers' states of each row as one state, `[R, H]`."""
        model = self._model
        states = self._batch.states.to(self._dtype)
        if model.input_norm is not None:
            states = self.norm(states, model.input_norm)
        if model.fc_norm is not None:
            parts = states.chunk(len(model.fc_norm), dim=-1)
            states = torch.cat(
                [self.norm(part, one) for part, one in zip(parts, model.fc_norm, strict=True)], dim=-1
            )
        return F.linear(states, model.fc.weight.to(self._dtype))

    def _embed(self) -> Tensor:
        with torch.no_grad():
            return F.embedding(self._batch.tokens, self._model.embed_tokens.weight).to(self._dtype)

    def _angles(self, steps: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine by position, `[longest sample + steps, 1, D]`; only differences matter."""
        device = self._batch.tokens.device
        positions = torch.arange(max(self._batch.lengths) + steps, device=device)
        like = torch.empty(1, dtype=torch.float32, device=device)
        cosine, sine = self._model.rotary_emb(like, positions[None])
        return cosine[0, :, None].to(self._dtype), sine[0, :, None].to(self._dtype)

    def _keys(self, embeds: Tensor, normed: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of step 0 for all rows, `[R, M, D]`."""
        queries = self._sizes[0]
        both = embeds[:, queries:] + F.linear(normed, self._for_states[queries:])
        return self._split_keys(both, angles, self._geometry.positions)

    def _project(
        self,
        embeds: Tensor,
        normed: Tensor,
        place: Tensor,
        angles: tuple[Tensor, Tensor],
        step: int,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Queries of a step `[S, N, D]`, and after the first step the row's own key and value."""
        queries = self._sizes[0]
        positions = self._geometry.positions.index_select(0, self._batch.supervised) + step
        if step == 0:
            q = embeds[:, :queries].index_select(0, place) + F.linear(normed, self._for_states[:queries])
            link = None
        else:
            all_three = embeds.index_select(0, place) + F.linear(normed, self._for_states)
            q = all_three[:, :queries]
            link = self._split_keys(all_three[:, queries:], angles, positions)
        q = q.reshape(len(q), -1, self._head_dim)
        return self._rotate(self._head_norm(q, "q_norm"), angles, positions), link

    def _split_keys(
        self, both: Tensor, angles: tuple[Tensor, Tensor], positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        keys, values = both.chunk(2, dim=-1)  # keys and values have as many heads
        keys, values = (side.reshape(len(both), -1, self._head_dim) for side in (keys, values))
        return self._rotate(self._head_norm(keys, "k_norm"), angles, positions), values

    def _head_norm(self, heads: Tensor, name: str) -> Tensor:
        module = getattr(self._layer.self_attn, name, None)  # Qwen3 has them, Llama does not
        return heads if module is None else self.norm(heads, module)

    def _rotate(self, heads: Tensor, angles: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
        cosine, sine = (side.index_select(0, positions) for side in angles)
        first, second = heads.chunk(2, dim=-1)
        return heads * cosine + torch.cat([-second, first], dim=-1) * sine

    def _finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        hidden = residual + F.linear(mixed, self._out, self._out_bias)
        gate, up = F.linear(self.norm(hidden, self._layer.post_attention_layernorm), self._gate_up).chunk(
            2, dim=-1
        )
        return hidden + F.linear(self._activation(gate) * up, self._down)
