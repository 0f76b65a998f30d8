import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from eagle3_pipeline.errors import Busy, DamagedFile, MissingInput
from eagle3_pipeline.journal import Journal
from eagle3_pipeline.manifest import MANIFEST_NAME
from eagle3_pipeline.shards.consumption import CONSUMED_NAME, consumption, mark_consumed
from eagle3_pipeline.shards.listing import JOURNAL_NAME, parts_of_shard
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.shards.repair import forget
from tests.shards.build import invent, make_shard, place_at


def _parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("part-*"))


def test_a_consumed_shard_counts_as_made_and_says_by_which_checkpoint_its_states_went(tmp_path: Path) -> None:
    folder, manifest = make_shard(tmp_path, [invent(30, seed) for seed in range(3)], 1)
    assert consumption(folder) is None
    mark_consumed(folder, "c" * 64, 2)
    assert _parts(folder) == []
    assert place_at(tmp_path).manifest() == manifest
    found = consumption(folder)
    assert found is not None
    assert (found.by, found.turn, found.manifest) == ("c" * 64, 2, manifest.digest)
    for read in (parts_of_shard, lambda one: ShardReader([one])):
        with pytest.raises(MissingInput, match=r"checkpoint cccccccccccc had learned.*turn 2"):
            read(folder)


def test_no_part_goes_before_the_record_stands_and_a_killed_deletion_is_finished(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(30, seed) for seed in range(3)], 1)
    unlink, deleted = os.unlink, []

    def killed(path: Path, *arguments: object, **keywords: object) -> None:
        assert consumption(folder) is not None
        if deleted:
            raise KeyboardInterrupt
        deleted.append(path)
        unlink(path)

    with patch.object(Path, "unlink", killed), pytest.raises(KeyboardInterrupt):
        mark_consumed(folder, "c" * 64, 0)
    assert len(_parts(folder)) == 2
    first = (folder / CONSUMED_NAME).read_bytes()
    mark_consumed(folder, "d" * 64, 1)
    assert _parts(folder) == []
    assert (folder / CONSUMED_NAME).read_bytes() == first


def test_a_forgotten_shard_is_made_again_from_nothing(tmp_path: Path) -> None:
    samples = [invent(30, seed) for seed in range(3)]
    folder, manifest = make_shard(tmp_path, samples, 1)
    forget(place_at(tmp_path, "not there"))
    mark_consumed(folder, "c" * 64, 0)
    forget(place_at(tmp_path))
    forget(place_at(tmp_path))
    assert consumption(folder) is None
    assert place_at(tmp_path).manifest() is None
    again_folder, again = make_shard(tmp_path, samples, 1)
    assert again.digest == manifest.digest
    assert len(ShardReader([again_folder])) == 3


def test_a_shard_that_is_not_complete_cannot_be_consumed(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(3, 0)])
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(MissingInput, match="not complete"):
        mark_consumed(folder, "c" * 64, 0)
    assert _parts(folder) == ["part-00000.safetensors"]


def test_a_record_that_says_nothing_is_damage(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(3, 0)])
    (folder / CONSUMED_NAME).write_text('{"by": "x"}')
    with pytest.raises(DamagedFile, match="does not say by which checkpoint"):
        consumption(folder)


def test_a_shard_that_another_process_forgot_and_made_again_is_left_as_it_is(tmp_path: Path) -> None:
    samples = [invent(30, seed) for seed in range(3)]
    folder, _ = make_shard(tmp_path, samples, 1)
    mark_consumed(folder, "c" * 64, 0)
    opened = Journal.__init__

    def forgotten_before_the_lock(self: Journal, *arguments: Any) -> None:
        with patch.object(Journal, "__init__", opened):
            forget(place_at(tmp_path))
            make_shard(tmp_path, samples, 1)
        opened(self, *arguments)

    with patch.object(Journal, "__init__", forgotten_before_the_lock):
        forget(place_at(tmp_path))
    assert place_at(tmp_path).manifest() is not None
    assert len(ShardReader([folder])) == 3


def test_a_shard_that_somebody_writes_is_not_forgotten(tmp_path: Path) -> None:
    folder, manifest = make_shard(tmp_path, [invent(30, 0)])
    mark_consumed(folder, "c" * 64, 0)
    with Journal(folder / JOURNAL_NAME, manifest.fingerprint), pytest.raises(Busy):
        forget(place_at(tmp_path))
    assert consumption(folder) is not None
