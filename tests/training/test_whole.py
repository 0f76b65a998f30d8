"""From samples and hidden states on the disk to a draft, through the real process."""

from contextlib import nullcontext
from pathlib import Path

from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.training.training import train_draft
from eagle3_pipeline.vocabulary.mapping import make_vocabulary
from tests.training.world import make_lineage, write_states


def test_a_draft_is_trained_from_what_lies_on_the_disk_once(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = make_lineage(tmp_path, tiny_llama)
    write_states(lineage, list(lineage.recipe.shards))
    vocabulary = lineage.vocabulary_map().require()
    assert vocabulary.facts["draft_tokens"] == 256
    assert 0.8 < vocabulary.facts["coverage"] <= 1
    manifest = train_draft(lineage, nullcontext())
    assert isinstance(manifest, Manifest)
    assert [entry.path for entry in manifest.files] == [
        "draft/config.json",
        "draft/model.safetensors",
        "metrics.jsonl",
    ]
    facts = manifest.facts
    assert facts["steps"] == facts["loss_curve"]["steps"][-1]
    assert facts["simulated_acceptance_length"] == 1 + sum(facts["simulated_acceptance_by_position"])
    lengths = facts["simulated_acceptance_by_tokens"]
    assert (len(lengths), lengths[-1]) == (3, facts["simulated_acceptance_length"])
    assert len(facts["accuracy_by_position"]) == 3
    assert facts["epochs"] == 2
    folder = lineage.draft_checkpoint().folder
    assert not (folder / "checkpoints").exists()
    assert not list(folder.glob("turn-*"))
    assert train_draft(lineage, nullcontext()) == manifest
    assert make_vocabulary(lineage) == vocabulary
