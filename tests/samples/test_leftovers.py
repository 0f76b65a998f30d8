"""A training that begins anew in the middle of waves: its plan, and what the one before it left."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Place
from eagle3_pipeline.samples import leftovers as leftovers_module
from eagle3_pipeline.samples.audit import audit_samples
from eagle3_pipeline.samples.checkpoint_bytes import checkpoint_bytes
from eagle3_pipeline.samples.extraction_room import require_room_for
from eagle3_pipeline.samples.leftovers import leftovers, what_to_delete
from eagle3_pipeline.waves import finish_turn, turns
from tests.generation.world import make_lineage
from tests.recipes import NOTHING_ON_ITS_WAY
from tests.samples.test_audit import make_samples

FIRST, SECOND, THIRD = (f"p10-s00{number}" for number in range(3))
WAVES = {"layers": [1, 2, 3, 4], "waves": 3, **NOTHING_ON_ITS_WAY}
SHARD_BYTES = 10 * 10 * 4 * 8 * 2


@pytest.fixture(autouse=True)
def _states_of_tests_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers_module, "_WORTH_BYTES", 1)


def made(tmp_path: Path, extraction: dict[str, Any] = WAVES, **sections: Any) -> Lineage:
    """Three shards of samples with their audit and vocabulary."""
    lineage = make_lineage(tmp_path, [1] * 30, 10, judges=3, extraction=extraction, **sections)
    for shard in lineage.recipe.shards:
        if lineage.synthetic_samples(shard).manifest() is None:
            make_samples(lineage, shard, ["good"] * 10)
    place = lineage.vocabulary_map()
    place.folder.mkdir(parents=True, exist_ok=True)
    place.finish([], {})
    audit_samples(lineage)
    return lineage


def write(folder: Path, name: str, count: int = SHARD_BYTES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(bytes(count))
    return folder / name


def extract(lineage: Lineage, shard: str) -> Place:
    place = lineage.hidden_state_shards(shard)
    place.finish([write(place.folder, "part-00000.safetensors")], {})
    return place


def train_first_wave(lineage: Lineage) -> Path:
    """The folder of the draft after the first turn, whose states are gone."""
    place = extract(lineage, FIRST)
    folder = lineage.draft_checkpoint().folder
    write(folder / "checkpoints" / "step-1", "weights.safetensors", 5000)
    write(folder / "validation", "part-00000.safetensors", 700)
    finish_turn(lineage, turns(lineage)[0], "checkpoint", {FIRST: place.require().digest}, {})
    return folder


def free(monkeypatch: pytest.MonkeyPatch, lineage: Lineage, count: int) -> None:
    """So many bytes may be written to states."""
    usage = namedtuple("usage", "free")
    kept = max(2**30, checkpoint_bytes(lineage))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free=kept + count))


def test_what_the_recipe_names_is_no_leftover(tmp_path: Path) -> None:
    lineage = made(tmp_path)
    train_first_wave(lineage)
    extract(lineage, SECOND)
    assert leftovers(lineage) == []


def test_checkpoints_and_validation_of_other_settings_of_the_training_are_left_over(tmp_path: Path) -> None:
    folder = train_first_wave(made(tmp_path))
    found = leftovers(made(tmp_path, training={"seed": 1}))
    assert [(one.folder, one.bytes) for one in found] == [
        (folder / "checkpoints", 5000),
        (folder / "validation", 700),
    ]


def test_in_another_form_all_states_and_their_training_are_left_over(tmp_path: Path) -> None:
    lineage = made(tmp_path)
    folder = train_first_wave(lineage)
    states = extract(lineage, SECOND).folder
    found = [one.folder for one in leftovers(made(tmp_path, {**WAVES, "precision": "fp8"}))]
    assert found[:2] == [states, folder / "checkpoints"]
    assert folder / "validation" in found
    assert lineage.hidden_state_shards(THIRD).folder not in found


def test_files_that_came_with_replies_are_left_over_once_nothing_is_captured_there(tmp_path: Path) -> None:
    one_pass = {**WAVES, "waves": 1, "while_generating": True}
    greedy = {"concurrency": 4, "max_completion_tokens": 64, "request_timeout_s": 30, "temperature": 0.0}
    lineage = make_lineage(tmp_path, [1] * 30, 10, extraction=one_pass, generation=greedy)
    write(lineage.captured(FIRST), "p0-t0.safetensors", 300)
    assert leftovers(lineage) == []
    other = make_lineage(tmp_path, [1] * 30, 10, extraction={**WAVES, "waves": 1}, generation=greedy)
    assert [one.folder for one in leftovers(other)] == [lineage.captured(FIRST)]


def test_only_the_largest_are_named_with_what_all_of_them_free() -> None:
    many = [leftovers_module.Leftover(Path(f"/s/{number}"), 2**30) for number in range(8)]
    said = what_to_delete(many)
    assert "/s/4 (1.00 GiB) and 3 more to free 8.00 GiB" in said


def test_an_audit_without_room_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_first_wave(made(tmp_path))
    lineage = made(tmp_path, {**WAVES, "precision": "fp8"})
    shutil.rmtree(lineage.sample_audit().folder)
    free(monkeypatch, lineage, 100)
    with pytest.raises(NotEnoughRoom, match=r"no longer used: delete .*checkpoints .*validation"):
        audit_samples(lineage)


def test_the_shards_asked_for_need_room_beside_what_the_training_before_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = made(tmp_path)
    folder = train_first_wave(before)
    early = extract(before, SECOND).folder
    lineage = made(tmp_path, training={"seed": 1})
    needed = SHARD_BYTES + 3 * SHARD_BYTES // 10  # with the copy of three samples that judge
    free(monkeypatch, lineage, needed - 1)
    with pytest.raises(NotEnoughRoom) as refusal:
        require_room_for(lineage, [FIRST])
    said = str(refusal.value)
    assert f"no longer used: delete {folder / 'checkpoints'}" in said
    assert "shards of other waves hold 0.00 GiB" in said
    assert f"in their turn: delete {early};" in said
    free(monkeypatch, lineage, needed)
    require_room_for(lineage, [FIRST])


def test_parts_and_a_validation_copy_that_are_there_ask_for_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = made(tmp_path)
    train_first_wave(lineage)
    write(lineage.hidden_state_shards(SECOND).folder, "part-00000.safetensors", SHARD_BYTES - 10)
    free(monkeypatch, lineage, 9)
    with pytest.raises(NotEnoughRoom):
        require_room_for(lineage, [SECOND])
    free(monkeypatch, lineage, 10)
    require_room_for(lineage, [SECOND])


def test_waves_that_a_training_goes_by_are_kept_when_a_bound_of_the_audit_is_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = {**WAVES, "waves": "auto"}
    with monkeypatch.context() as patched:
        patched.setattr("eagle3_pipeline.samples.audit.require_room", lambda fit: fit.wave_plan)
        usage = namedtuple("usage", "free")
        patched.setattr(shutil, "disk_usage", lambda _: usage(free=0))
        lineage = made(tmp_path, auto)
    assert len(lineage.waves()[0]) == 3
    bounds = {"concurrency": 4, "max_completion_tokens": 64, "request_timeout_s": 30}
    without = made(tmp_path, auto, generation={**bounds, "max_truncated_share": 0.4})
    assert len(without.waves()[0]) == 1  # no turn is done: it is cut by the room of this moment
    train_first_wave(lineage)
    edited = made(tmp_path, auto, generation={**bounds, "max_truncated_share": 0.3})
    assert edited.sample_audit().folder != lineage.sample_audit().folder
    assert edited.waves() == lineage.waves()
    assert edited.draft_checkpoint().folder == lineage.draft_checkpoint().folder
    assert leftovers(edited) == []
    other = made(tmp_path, {**auto, "precision": "fp8"})
    assert len(other.waves()[0]) == 1
