"""Invented hidden states, and complete shards of them."""

from pathlib import Path

import torch

from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.shards.format import ShardLayout
from eagle3_pipeline.shards.writer import ShardWriter

LAYOUT = ShardLayout((2, 5, 8), 4, "m" * 64)
Invented = dict[str, torch.Tensor]


def invent(tokens: int, seed: int, layout: ShardLayout = LAYOUT) -> Invented:
    """One sample; the same seed gives the same values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, len(layout.layer_ids), layout.hidden_size)
    return {
        "hidden_states": torch.randn(shape, generator=generator).to(torch.bfloat16),
        "token_ids": torch.randint(0, 50_000, (tokens,), generator=generator),
        "loss_mask": torch.arange(tokens) >= tokens // 2,
    }


def place_at(folder: Path, shard: str = "p4-s000") -> Place:
    return Place(folder / shard, "hidden_state_shards", "f" * 64, {}, shard)


def make_shard(
    folder: Path,
    samples: list[Invented],
    part_bytes: int = 1 << 30,
    shard: str = "p4-s000",
    layout: ShardLayout = LAYOUT,
) -> tuple[Path, Manifest]:
    """A complete shard; sample i is called `<shard>-i`."""
    place = place_at(folder, shard)
    with ShardWriter(place.folder, layout, part_bytes, place.fingerprint) as writer:
        for number, sample in enumerate(samples):
            writer.add(f"{shard}-{number}", **sample)
        manifest = place.finish(writer.complete(), {"quarantined": {"not_finite": 1}, "skipped": {}})
        writer.close(finished=True)
    return place.folder, manifest


def same(one: Invented, other: Invented) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
