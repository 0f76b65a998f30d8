"""An EAGLE-3 draft read as its authors publish them, by nothing of this project: config, names, computation.

Source: SafeAILab/EAGLE, eagle/model/cnets.py. H hidden size, R rows (tokens of one conversation).
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

NAMES = {
    *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
    *(f"midlayer.{one}.weight" for one in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    *(f"midlayer.self_attn.{one}_proj.weight" for one in "qkvo"),
    *(f"midlayer.mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
}


class PublishedDraft:
    """One draft, in float32, with the target's embedding."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self._embedding = embedding.float()

    def proposals(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The target's token that each row proposes, `[R]`; `states` is `[R, 3 H]`, `tokens` `[R]`."""
        hidden = self._apply("fc", states.float())
        normed = [self._norm("input_layernorm", self._embedding[tokens]), self._norm("hidden_norm", hidden)]
        hidden = hidden + self._attention(torch.cat(normed, dim=-1))
        inside = self._norm("post_attention_layernorm", hidden)
        gate, up = (self._apply(f"midlayer.mlp.{one}_proj", inside) for one in ("gate", "up"))
        hidden = hidden + self._apply("midlayer.mlp.down_proj", F.silu(gate) * up)
        ids = self._apply("lm_head", self._norm("norm", hidden, "")).argmax(-1)
        return ids + self.tensors["d2t"][ids]

    def _apply(self, name: str, rows: Tensor) -> Tensor:
        return rows @ self.tensors[f"{name}.weight"].float().T

    def _norm(self, name: str, rows: Tensor, prefix: str = "midlayer.") -> Tensor:
        mean = rows.pow(2).mean(-1, keepdim=True)
        scaled = rows * torch.rsqrt(mean + self.config["rms_norm_eps"])
        return scaled * self.tensors[f"{prefix}{name}.weight"].float()

    def _attention(self, rows: Tensor) -> Tensor:
        size, count = self.config["head_dim"], self.config["num_attention_heads"]
        heads = {
            one: self._apply(f"midlayer.self_attn.{one}_proj", rows).view(len(rows), -1, size).transpose(0, 1)
            for one in "qkv"
        }
        groups = count // self.config["num_key_value_heads"]
        keys, values = (heads[one].repeat_interleave(groups, dim=0) for one in "kv")
        scores = self._turn(heads["q"]) @ self._turn(keys).transpose(1, 2) / size**0.5
        later = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ values
        return self._apply("midlayer.self_attn.o_proj", mixed.transpose(0, 1).reshape(len(rows), -1))

    def _turn(self, heads: Tensor) -> Tensor:
        """Rotary positions, of the plain kind."""
        assert self.config["rope_scaling"] is None
        half = heads.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = (torch.arange(heads.shape[1])[:, None] * frequencies).repeat(1, 2)
        first, second = heads.chunk(2, dim=-1)
        return heads * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
