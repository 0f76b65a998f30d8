"""Whether a recipe fits the machine: only what is still missing counts, and what we hold is not missing."""

import logging
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from eagle3_pipeline import room
from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.room import expected_plan, require_machine
from tests.recipes import NOTHING_ON_ITS_WAY, finish_prompts, tiny_recipe
from tests.samples.test_audit import make_samples as make

HIDDEN = 64
# At a tenth of 128 completion tokens: 8 samples, 4 layers, bfloat16.
SHARD_BYTES = 8 * 12 * 4 * HIDDEN * 2


def finish(place: Place, facts: dict[str, Any] | None = None) -> Manifest:
    place.folder.mkdir(parents=True, exist_ok=True)
    return place.finish([], facts or {})


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    """Three shards of which nothing is made but the target and the prompts."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"num_hidden_layers": 8}')
    recipe = tiny_recipe(tmp_path, model, extraction=NOTHING_ON_ITS_WAY)
    made = Lineage(load_recipe(str(recipe), tmp_path), tmp_path / "storage")
    finish(made.target_model(), {"model_fingerprint": "m", "hidden_size": HIDDEN, "bytes": 1000})
    finish_prompts(made)
    return made


def free(monkeypatch: pytest.MonkeyPatch, *, disk: int = 1 << 60, memory: int = 1 << 60) -> None:
    """So many bytes are free; of the disk, without those that storage.keep_free_gib keeps."""
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free=disk + 2**30))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory))


def make_samples(lineage: Lineage, shard: str, tokens: int = 12) -> None:
    """Eight samples of so many tokens, all of them completion."""
    make(lineage, shard, ["good"] * 8, tokens=(0, tokens))


def test_a_disk_without_room_for_short_completions_is_refused_and_the_next_larger_is_warned_of(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free(monkeypatch, disk=3 * SHARD_BYTES - 1)
    with pytest.raises(
        NotEnoughRoom, match=r"even at a mean of 13 completion tokens, .*Choices: .*run\.shards: 2 of 3"
    ):
        require_machine(lineage)
    free(monkeypatch, disk=3 * SHARD_BYTES)
    with caplog.at_level(logging.WARNING):
        require_machine(lineage)
    assert "the hidden states may not fit" in caplog.text


def test_states_that_are_there_need_no_room(lineage: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in lineage.recipe.shards[:2]:
        make_samples(lineage, shard)
        finish(lineage.hidden_state_shards(shard))
    free(monkeypatch, disk=SHARD_BYTES - 1)
    with pytest.raises(NotEnoughRoom):
        require_machine(lineage)
    free(monkeypatch, disk=SHARD_BYTES)
    require_machine(lineage)
    make_samples(lineage, lineage.recipe.shards[2])
    finish(lineage.hidden_state_shards(lineage.recipe.shards[2]))
    free(monkeypatch, disk=0)
    require_machine(lineage)


def test_with_waves_only_one_of_them_must_fit_and_the_validation_samples(
    tmp_path: Path, lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    extraction = lineage.recipe.extraction.model_copy(update={"waves": "auto"})
    recipe = lineage.recipe.model_copy(update={"extraction": extraction})
    in_waves = Lineage(recipe, lineage.storage_root)
    needed = SHARD_BYTES + SHARD_BYTES // 4  # two of the first eight samples judge
    free(monkeypatch, disk=needed - 1)
    with pytest.raises(NotEnoughRoom, match="in 3 waves"):
        require_machine(in_waves)
    free(monkeypatch, disk=needed)
    require_machine(in_waves)


def test_prompts_that_judge_are_expected_to_have_as_many_turns_as_the_others(
    lineage: Lineage,
) -> None:
    for turns, judging in ((1, 2), (3, 6)):  # of eight prompts two judge
        plan = expected_plan(lineage, {}, [(0, 12)] * 8 * turns)
        assert [one.judging for one in plan.shards] == [judging, 0, 0]
        assert plan.validation_bytes == turns * SHARD_BYTES // 4


def test_parts_that_are_there_and_samples_that_came_out_short_need_less(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = lineage.recipe.shards
    make_samples(lineage, first)
    place = lineage.hidden_state_shards(first)
    place.folder.mkdir(parents=True)
    (place.folder / "part-00000.safetensors").write_bytes(b"x" * SHARD_BYTES)
    for shard in (second, third):
        make_samples(lineage, shard, tokens=3)
    needed = 2 * 8 * 3 * 4 * HIDDEN * 2
    free(monkeypatch, disk=needed - 1)
    with pytest.raises(NotEnoughRoom):
        require_machine(lineage)
    free(monkeypatch, disk=needed)
    require_machine(lineage)


def test_memory_that_a_server_of_ours_holds_is_not_missing(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, memory=1 << 30)
    with pytest.raises(NotEnoughRoom, match=r"takes about 3\.5 GiB of memory .*, 1\.0 GiB are available"):
        require_machine(lineage)
    ours = SimpleNamespace(overlaps=lambda gpus: gpus == ())
    monkeypatch.setattr(room, "running_servers", lambda: [ours])
    require_machine(lineage)
    elsewhere = SimpleNamespace(overlaps=lambda gpus: False)
    monkeypatch.setattr(room, "running_servers", lambda: [elsewhere])
    with pytest.raises(NotEnoughRoom):
        require_machine(lineage)


def test_a_released_recipe_needs_nothing(lineage: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in lineage.recipe.shards:
        make_samples(lineage, shard)
        finish(lineage.hidden_state_shards(shard))
    for name in ("sample_audit", "vocabulary_map", "draft_checkpoint", "acceptance_report", "released_draft"):
        finish(getattr(lineage, name)())
    free(monkeypatch, disk=0, memory=0)
    require_machine(lineage)


def test_once_the_audit_stands_the_room_is_not_judged_again(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in lineage.recipe.shards:
        make_samples(lineage, shard)
    free(monkeypatch, disk=0)
    with pytest.raises(NotEnoughRoom):
        require_machine(lineage)
    finish(lineage.sample_audit())
    require_machine(lineage)
