"""Recipes for the doctor to look at; nothing of them is made."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.doctor import disks, leftovers
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from tests.recipes import NOTHING_ON_ITS_WAY, tiny_recipe

LineageMaker = Callable[..., Lineage]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a config.json alone."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def make_lineage(tmp_path: Path, model: Path) -> LineageMaker:
    """The lineage of a tiny recipe with changes."""

    def make(**changes: Any) -> Lineage:
        changes = {"extraction": NOTHING_ON_ITS_WAY} | changes
        recipe = load_recipe(str(tiny_recipe(tmp_path, model, **changes)), tmp_path)
        return Lineage(recipe, tmp_path / "storage")

    return make


@pytest.fixture(autouse=True)
def _folders_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other programs leave on this machine is no matter of a test."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(leftovers, "_TEMPORARY", tmp_path / "tmp")
    monkeypatch.setattr(disks, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(disks, "_TEMPORARY", tmp_path / "tmp")
