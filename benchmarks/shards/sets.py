"""The same invented samples as shards of each form, and one file per sample as speculators has them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file

from eagle3_pipeline.manifest import Place
from eagle3_pipeline.shards.format import ShardLayout
from eagle3_pipeline.shards.writer import ShardWriter

# Those of recipes/smollm2-cpu.yaml; lengths are like those of its samples.
LAYERS = (2, 15, 27, 30)
HIDDEN = 576
_MEAN_TOKENS, _LEAST, _MOST = 233, 40, 800
_PART_BYTES = 256 << 20
FORMS = {
    f"{precision}-{kept}": ShardLayout(LAYERS, HIDDEN, "0" * 64, precision, kept)
    for precision, kept in product(("bf16", "fp8"), ("all", "trained"))
}


@dataclass(frozen=True)
class Sample:
    """As the writer takes it."""

    hidden_states: torch.Tensor
    token_ids: torch.Tensor
    loss_mask: torch.Tensor


def invent(count: int) -> Iterator[Sample]:
    """`count` samples; the first of more are the same."""
    lengths = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        tokens = min(_MOST, max(_LEAST, int(lengths.expovariate(1 / _MEAN_TOKENS))))
        states = torch.randn(tokens, len(LAYERS), HIDDEN, generator=generator)
        ids = torch.randint(0, 49_152, (tokens,), generator=generator)
        yield Sample(states.to(torch.bfloat16), ids, torch.arange(tokens) >= tokens // 4)


def write_shard(folder: Path, form: str, count: int) -> Path:
    """A complete shard of `count` samples; its folder."""
    place = Place(folder / form, "hidden_state_shards", "0" * 64, {})
    with ShardWriter(place.folder, FORMS[form], _PART_BYTES, place.fingerprint) as writer:
        for number, sample in enumerate(invent(count)):
            writer.add(str(number), sample.hidden_states, sample.token_ids, sample.loss_mask)
        place.finish(writer.complete(), {})
        writer.close(finished=True)
    return place.folder


def write_files(folder: Path, count: int) -> Path:
    """What `generate-offline-data` leaves: an Arrow table of ids and masks, one file of states per sample."""
    rows = []
    for number, sample in enumerate(invent(count)):
        path = folder / "hidden_states" / f"hs_{number}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"hidden_states": sample.hidden_states, "token_ids": sample.token_ids}, path)
        ids = sample.token_ids.tolist()
        rows.append({"input_ids": ids, "loss_mask": sample.loss_mask.tolist(), "seq_len": len(ids)})
    Dataset.from_list(rows).with_format("torch").save_to_disk(folder)
    return folder
