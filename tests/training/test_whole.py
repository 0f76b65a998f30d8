"""From samples and hidden states on the disk to a draft, through the real process."""

from contextlib import nullcontext
from pathlib import Path

import torch

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.samples import SAMPLES_NAME, Sample, write_samples
from eagle3_pipeline.shards.format import ShardLayout
from eagle3_pipeline.shards.writer import ShardWriter
from eagle3_pipeline.target import make_target
from eagle3_pipeline.training.training import train_draft
from eagle3_pipeline.vocabulary.mapping import make_vocabulary
from tests.recipes import finish_prompts, tiny_recipe


def _replies(shard: str, generator: torch.Generator) -> list[Sample]:
    replies = []
    for number in range(8):
        prompt, completion = (
            torch.randint(0, 300, (size,), generator=generator).tolist() for size in (9, 25)
        )
        replies.append(
            Sample(
                sample_id=f"{shard}-{number}-t0",
                prompt_id=f"{shard}-{number}",
                turn=0,
                prompt_token_ids=prompt,
                completion_token_ids=completion,
                finish_reason="stop",
                content="",
                reasoning="",
                usage={},
                sampling={},
                server="",
                verdict="good",
            )
        )
    return replies


def _write_inputs(lineage: Lineage) -> None:
    """Samples and random hidden states of all shards."""
    generator = torch.Generator().manual_seed(0)
    facts = lineage.target_model().require().facts
    layout = ShardLayout(lineage.recipe.extraction.layers, facts["hidden_size"], facts["model_fingerprint"])
    for shard in lineage.recipe.shards:
        replies = _replies(shard, generator)
        place = lineage.synthetic_samples(shard)
        write_samples(place.folder / SAMPLES_NAME, replies)
        place.finish([place.folder / SAMPLES_NAME], {})
        place = lineage.hidden_state_shards(shard)
        place.folder.mkdir(parents=True)
        with ShardWriter(place.folder, layout, 1 << 30, place.fingerprint) as writer:
            for one in replies:
                shape = (len(one.token_ids), len(layout.layer_ids), layout.hidden_size)
                states = torch.randn(shape, generator=generator).to(torch.bfloat16)
                writer.add(one.sample_id, states, torch.tensor(one.token_ids), torch.tensor(one.loss_mask))
            parts = writer.complete()
        place.finish(parts, {})


def test_a_draft_is_trained_from_what_lies_on_the_disk_once(tmp_path: Path, tiny_llama: Path) -> None:
    recipe = load_recipe(str(tiny_recipe(tmp_path / "recipe", tiny_llama)), tmp_path)
    lineage = Lineage(recipe, tmp_path / "storage")
    make_target(lineage)
    finish_prompts(lineage)
    _write_inputs(lineage)
    vocabulary = make_vocabulary(lineage)
    assert vocabulary.facts["draft_tokens"] == 256
    assert 0.8 < vocabulary.facts["coverage"] <= 1
    manifest = train_draft(lineage, nullcontext())
    assert [entry.path for entry in manifest.files] == [
        "draft/config.json",
        "draft/model.safetensors",
        "metrics.jsonl",
    ]
    facts = manifest.facts
    assert facts["steps"] == facts["loss_curve"]["steps"][-1]
    assert facts["simulated_acceptance_length"] == 1 + sum(facts["simulated_acceptance_by_position"])
    assert len(facts["accuracy_by_position"]) == 3
    assert facts["epochs"] == 2
    folder = lineage.draft_checkpoint().folder
    assert not (folder / "checkpoints").exists()
    assert train_draft(lineage, nullcontext()) == manifest
    assert make_vocabulary(lineage) == vocabulary
