"""Invented hidden states, and complete shards of them."""

from itertools import product
from pathlib import Path

import torch

from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.shards.format import ShardLayout
from eagle3_pipeline.shards.precision import quantise, restore
from eagle3_pipeline.shards.writer import ShardWriter

LAYOUT = ShardLayout((2, 5, 8), 4, "m" * 64)
LAYOUTS = [
    ShardLayout(LAYOUT.layer_ids, LAYOUT.hidden_size, LAYOUT.model_fingerprint, precision, kept)
    for precision, kept in product(("bf16", "fp8"), ("all", "trained"))
]
Invented = dict[str, torch.Tensor]
_FACTS = {
    "quarantined": {"not_finite": 1},
    "skipped": {},
    "scales": {"2": 0.1, "5": 0.2, "8": 0.4},
}


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


def write_shard(
    place: Place, samples: dict[str, Invented], part_bytes: int = 1 << 30, layout: ShardLayout = LAYOUT
) -> list[str]:
    """Complete the shard at `place`; the ids of the samples that it still lacked."""
    with ShardWriter(place.folder, layout, part_bytes, place.fingerprint) as writer:
        missing = [sample_id for sample_id in samples if sample_id not in writer.done]
        for sample_id in missing:
            writer.add(sample_id, **samples[sample_id])
        parts = writer.complete()
        place.finish(parts, _FACTS, checksums=parts)
        writer.close(finished=True)
    return missing


def make_shard(
    folder: Path,
    samples: list[Invented],
    part_bytes: int = 1 << 30,
    shard: str = "p4-s000",
    layout: ShardLayout = LAYOUT,
) -> tuple[Path, Manifest]:
    """A complete shard; sample i is called `<shard>-i`."""
    place = place_at(folder, shard)
    named = {f"{shard}-{number}": sample for number, sample in enumerate(samples)}
    write_shard(place, named, part_bytes, layout)
    return place.folder, place.require()


def same(one: Invented, other: Invented) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def as_read(sample: Invented, layout: ShardLayout) -> Invented:
    """What a reader makes of a sample that was written in `layout`."""
    states = sample["hidden_states"].clone()
    if layout.kept == "trained":
        states[~sample["loss_mask"], -1] = 0
    return sample | {"hidden_states": restore(*quantise(states)) if layout.precision == "fp8" else states}


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
