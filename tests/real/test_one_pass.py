"""Samples and their states in one pass on the real vLLM: right texts, right states, and no second server."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.extraction.captured import captured
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.generation.collection import collect_samples
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts.selection import make_prompts
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.samples import SAMPLES_NAME, read_samples
from eagle3_pipeline.serving.server import stop_servers
from eagle3_pipeline.target import make_target
from resources import VllmServers
from tests.real.test_extraction import _reference
from tests.real.test_servers import greedy
from tests.recipes import tiny_recipe

pytestmark = pytest.mark.real


def test_samples_and_their_states_come_in_one_pass(tmp_path: Path, tiny_llama: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = tiny_recipe(
        tmp_path,
        tiny_llama,
        prompts={"count": 16},
        generation={"temperature": 0.0, "max_completion_tokens": 200},
        extraction={"while_generating": True},
    )
    lineage = Lineage(load_recipe(str(path), tmp_path), tmp_path / "storage")
    make_target(lineage)
    make_prompts(lineage)
    shards = lineage.recipe.shards
    try:
        server = partial(VllmServers().generation, lineage)
        collect_samples(lineage, shards, server, lambda shard, manifest: None)
    finally:
        stop_servers(())
    (canary,) = (lineage.folder / "canary").iterdir()
    answers: list[dict[str, Any]] = json.loads(canary.read_text())
    for answer in answers:
        assert len(answer["as_good"]) == len(answer["token_ids"])
        assert all(token in good for token, good in zip(answer["token_ids"], answer["as_good"], strict=True))
    assert {path.name for path in lineage.staging.with_name("captured").glob("*.safetensors*")} == set()
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).eval()
    layers = lineage.recipe.extraction.layers
    for shard in shards:
        for sample in read_samples(lineage.synthetic_samples(shard).folder / SAMPLES_NAME):
            assert sample.completion_token_ids == greedy(model, sample), sample.sample_id
            ids = sample.token_ids[:-1]
            found = captured(
                lineage, shard, PlannedSample(sample.sample_id, ids, sample.loss_mask[: len(ids)])
            )
            assert found is not None, sample.sample_id
            expected = _reference(tiny_llama, ids, layers)
            cosine = torch.cosine_similarity(found.states.float(), expected, dim=-1)
            assert cosine.mean(dim=0).min() > 0.999, (sample.sample_id, cosine.mean(dim=0))
