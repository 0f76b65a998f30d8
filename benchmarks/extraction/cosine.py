"""How alike two sets of states of the same samples are, layer by layer."""

from typing import Any

import torch

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.shards.reader import ShardReader


def bytes_of_states(lineage: Lineage) -> int:
    """Bytes of all parts of a recipe's shards."""
    return sum(lineage.hidden_state_shards(shard).require().bytes for shard in lineage.recipe.shards)


def cosine_by_layer(one: Lineage, other: Lineage) -> dict[int, dict[str, float]]:
    """Layer id -> mean and least cosine of the rows of both, over the samples that both have."""
    layers = one.recipe.extraction.layers
    total, rows = torch.zeros(len(layers), dtype=torch.float64), 0
    least = torch.ones(len(layers), dtype=torch.float64)
    for shard in one.recipe.shards:
        readers = [ShardReader([lineage.hidden_state_shards(shard).folder]) for lineage in (one, other)]
        places = {sample_id: index for index, sample_id in enumerate(readers[1].sample_ids)}
        for index, sample_id in enumerate(readers[0].sample_ids):
            if sample_id not in places:
                continue
            states = [readers[0][index]["hidden_states"], readers[1][places[sample_id]]["hidden_states"]]
            cosine = torch.cosine_similarity(states[0].double(), states[1].double(), dim=-1)
            total += cosine.sum(dim=0)
            rows += len(cosine)
            least = torch.minimum(least, cosine.amin(dim=0))
    found: dict[int, dict[str, Any]] = {
        layer: {"mean": round(float(total[number]) / rows, 6), "least": round(float(least[number]), 6)}
        for number, layer in enumerate(layers)
    }
    return found
