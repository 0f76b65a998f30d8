"""Shards that a training opens: of its target and layers, or refused before the first step."""

from pathlib import Path

import pytest
import torch

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.manifest import Place
from eagle3_pipeline.shards.format import ShardLayout
from eagle3_pipeline.shards.writer import ShardWriter
from eagle3_pipeline.training.source import ShardSource
from tests.training.tiny import HIDDEN, LAYERS, memory

MODEL = "m" * 64


def _shard(folder: Path, layers: tuple[int, ...] = LAYERS, model: str = MODEL) -> Path:
    place = Place(folder, "hidden_state_shards", "f" * 64, {})
    folder.mkdir()
    with ShardWriter(folder, ShardLayout(layers, HIDDEN, model), 1 << 20, place.fingerprint) as writer:
        for number, one in enumerate(memory([(9, 3), (12, 4)]).samples):
            writer.add(f"{number}-t0", **one)
        place.finish(writer.complete(), {})
        writer.close(finished=True)
    return folder


def test_the_samples_of_all_shards_are_read_in_order(tmp_path: Path) -> None:
    source = ShardSource([_shard(tmp_path / "a"), _shard(tmp_path / "b")], LAYERS, MODEL)
    assert [source.name(index) for index in range(len(source))] == ["0-t0", "1-t0", "0-t0", "1-t0"]
    assert source.loss_mask(3).tolist() == (torch.arange(12) >= 4).tolist()


def test_states_of_other_layers_are_refused_with_both(tmp_path: Path) -> None:
    shard = _shard(tmp_path / "a", layers=(1, 5, 7, 9))
    with pytest.raises(DamagedFile, match=r"hold the layers \[1, 5, 7, 9\], expected \[2, 5, 7, 9\]"):
        ShardSource([shard], LAYERS, MODEL)


def test_states_of_another_model_are_refused_with_both(tmp_path: Path) -> None:
    shard = _shard(tmp_path / "a", model="o" * 64)
    with pytest.raises(DamagedFile, match="of the model oooooooooooo, expected those of the target, mmm"):
        ShardSource([shard], LAYERS, MODEL)


def test_shards_of_two_models_are_refused_together(tmp_path: Path) -> None:
    shards = [_shard(tmp_path / "a"), _shard(tmp_path / "b", model="o" * 64)]
    with pytest.raises(DamagedFile, match="one target and the same layers"):
        ShardSource(shards, LAYERS, MODEL)
