"""Recipes for a tiny target: a YAML file with its prompts beside it, for the stand-in and the real vLLM."""

import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from tests.corpus import TEXT

FAKE_PYTHON = Path(__file__).parent / "fakes" / "python"

_ASKS = (
    "What is the difference between {} and {}?",
    "Explain to a child how {} and {} belong together.",
    "Write a short letter about {} to somebody who only knows {}.",
    "List three reasons why {} comes before {}.",
    "Translate a sentence with {} and {} into another language.",
    "Two friends talk about {}; one of them wants {}. What do they say?",
)


def tiny_recipe(tmp_path: Path, model_folder: Path, **changes: Any) -> Path:
    """Write a recipe for the model in `model_folder` below `tmp_path` and return the path of its YAML file.

    The real vLLM serves it, unless the change `fake=True` puts the stand-in in its place. Any other change is
    a section of the recipe whose settings are changed one by one, e.g. `prompts={"count": 16}`; a dict goes
    into a dict, everything else is replaced. The prompts are distinct, and none is like one for evaluation.
    """
    fake = changes.pop("fake", False)
    layers = json.loads((model_folder / "config.json").read_text())["num_hidden_layers"]
    recipe = _merge(_tiny(model_folder, layers), changes)
    if fake:
        recipe["server"]["common"].setdefault("python", str(FAKE_PYTHON))
    tmp_path.mkdir(parents=True, exist_ok=True)
    count = recipe["prompts"]["count"]
    write_prompts(tmp_path / "train.jsonl", distinct_prompts(2 * count, seed=1))
    write_prompts(tmp_path / "evaluation.jsonl", distinct_prompts(8, seed=2))
    path = tmp_path / f"{recipe['name']}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


NOTHING_ON_ITS_WAY = {"staging_gib": 1e-10}
"""For `extraction`: tests that count the bytes of states leave out the staging, which is no byte then."""


def _tiny(model_folder: Path, layers: int) -> dict[str, Any]:
    cpu = dict.fromkeys(("generation", "extraction", "training", "evaluation"), "cpu")
    common = {
        "max_model_len": 512,
        "gpu_memory_utilization": 0.1,
        "cpu_kv_cache_gib": 1,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "start_timeout_s": 300,
        "idle_timeout_s": 120,
    }
    evaluation_set = {"name": "tiny", "path": "evaluation.jsonl", "column": "prompt"}
    return {
        "name": "tiny",
        "target": {"path": str(model_folder)},
        "partitions": cpu,
        "server": {"common": common},
        "prompts": {
            "sources": [{"path": "train.jsonl", "column": "prompt"}],
            "count": 24,
            "per_shard": 8,
            "validation": 2,
            "max_prompt_tokens": 200,
        },
        "generation": {"concurrency": 8, "max_completion_tokens": 128, "request_timeout_s": 60},
        "extraction": {
            "layers": [1, layers // 2, layers - 1, layers],
            "concurrency": 8,
            "max_sample_tokens": 400,
        },
        "vocabulary": {"draft_tokens": 256},
        "training": {"epochs": 2, "tokens_per_step": 512, "test_time_steps": 3},
        "evaluation": {"sets": [evaluation_set], "max_completion_tokens": 64, "speculative_tokens": 3},
        "release": {"license": "apache-2.0"},
    }


def distinct_prompts(count: int, *, seed: int) -> list[str]:
    """`count` prompts, no two of them alike in their 5-word shingles; other seeds give other prompts."""
    chance = random.Random(seed)
    phrases = _phrases()
    pairs = list(itertools.permutations(phrases, 2))
    chance.shuffle(pairs)
    return [chance.choice(_ASKS).format(*pair) for pair in pairs[:count]]


def _phrases() -> list[str]:
    """Runs of words of the tests' text, long enough to make each prompt its own."""
    words = re.findall(r"[a-z]+", TEXT.lower())
    return [" ".join(words[start : start + 6]) for start in range(0, len(words) - 6, 6)]


def write_prompts(path: Path, prompts: list[str]) -> Path:
    """Write prompts as JSON lines with the columns `prompt` and `kind`."""
    path.write_text("".join(json.dumps({"kind": "tiny", "prompt": prompt}) + "\n" for prompt in prompts))
    return path


def finish_prompts(lineage: Lineage, validation: Sequence[str] = ()) -> Manifest:
    """Say that the prompts are made, without any: what samples depend on is the digest of each shard.

    `validation` are the ids of the prompts that judge.
    """
    place, plan = lineage.prompts(), lineage.recipe.prompts
    place.folder.mkdir(parents=True, exist_ok=True)
    shards = {shard: f"of {shard}" for shard in plan.shards}
    return place.finish([], {"count": plan.count, "validation": list(validation), "shards": shards})


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
