import logging
import os
import tempfile
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.errors import Busy, MissingInput
from eagle3_pipeline.journal import Journal
from eagle3_pipeline.manifest import MANIFEST_NAME
from eagle3_pipeline.shards.consumption import mark_consumed
from eagle3_pipeline.shards.format import read_header
from eagle3_pipeline.shards.listing import JOURNAL_NAME
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.shards.repair import damaged_parts, reopen
from eagle3_pipeline.shards.writer import ShardWriter
from tests.shards.build import LAYOUT, LAYOUTS, as_read, flip, invent, make_shard, place_at, same, write_shard

_DAMAGE = ("cut", "grown", "missing", "header", "version", "flipped")


def _damage(part: Path, kind: str) -> None:
    data = part.read_bytes()
    if kind == "missing":
        part.unlink()
    elif kind == "flipped":
        flip(part, -1)
    else:
        changed = {
            "cut": data[:-3],
            "grown": data + b"x",
            "header": data[:8] + b"x" + data[9:],
            "version": data.replace(b'"format_version":"2"', b'"format_version":"1"'),
        }
        part.write_bytes(changed[kind])


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    part_bytes=st.integers(1, 8_000),
    layout=st.sampled_from(LAYOUTS),
    complete=st.booleans(),
    data=st.data(),
)
def test_after_any_damage_exactly_the_samples_of_the_damaged_parts_are_made_again(
    lengths: list[int], part_bytes: int, layout: object, complete: bool, data: st.DataObject
) -> None:
    assert isinstance(layout, type(LAYOUT))
    samples = {f"s{seed}": invent(tokens, seed) for seed, tokens in enumerate(lengths)}
    with tempfile.TemporaryDirectory() as temporary:
        place = place_at(Path(temporary))
        write_shard(place, samples, part_bytes, layout)
        for _ in range(2):  # damaged, completed, and damaged again
            parts = sorted(place.folder.glob("part-*"))
            held = {part: read_header(part).sample_ids for part in parts}
            if not complete:
                reopen(place)
            chosen = data.draw(st.lists(st.sampled_from(parts), unique=True))
            # Only a complete shard has checksums to find a flipped bit with.
            kinds = st.sampled_from(_DAMAGE if complete else _DAMAGE[:-1])
            damage = {part: data.draw(kinds) for part in chosen}
            for part, kind in damage.items():
                _damage(part, kind)
            if complete:
                seen = {part for part, kind in damage.items() if kind != "flipped"}
                assert set(damaged_parts(place)) == seen
                reopen(place)
            again = write_shard(place, samples, part_bytes, layout)
            assert set(again) == {sample_id for part in chosen for sample_id in held[part]}
            assert damaged_parts(place) == {}
            place.verify()
            reader = ShardReader([place.folder])
            assert sorted(reader.sample_ids) == sorted(samples)
            for index, sample_id in enumerate(reader.sample_ids):
                assert same(reader[index], as_read(samples[sample_id], layout))


@settings(deadline=None, max_examples=10)
@given(moments=st.lists(st.integers(0, 12), max_size=3), kind=st.sampled_from(_DAMAGE))
def test_a_kill_while_a_shard_is_reopened_or_completed_costs_no_sound_part(
    moments: list[int], kind: str
) -> None:
    samples = {f"s{seed}": invent(30, seed) for seed in range(4)}
    with tempfile.TemporaryDirectory() as temporary:
        place = place_at(Path(temporary))
        write_shard(place, samples, 1)
        _damage(place.folder / "part-00001.safetensors", kind)
        sound = {path: path.stat().st_mtime_ns for path in place.folder.glob("part-0000[023]*")}
        for moment in moments:
            _repair_until_killed(place.folder.parent, moment)
        _repair(place.folder.parent)
        assert {path: path.stat().st_mtime_ns for path in sound} == sound
        reader = ShardReader([place.folder])
        assert {
            sample_id: reader[index]["token_ids"].tolist()
            for index, sample_id in enumerate(reader.sample_ids)
        } == {sample_id: sample["token_ids"].tolist() for sample_id, sample in samples.items()}


def _repair(folder: Path) -> None:
    """As the step does it: a journal beside a manifest vouches for nothing."""
    place = place_at(folder)
    if place.manifest() is not None:
        (place.folder / JOURNAL_NAME).unlink(missing_ok=True)
        if (place.folder / "part-00001.safetensors").exists():
            reopen(place)  # a person saw the flipped bit
        elif damaged_parts(place):
            reopen(place)
    if place.manifest() is None:
        write_shard(place, {f"s{seed}": invent(30, seed) for seed in range(4)}, 1)


def _repair_until_killed(folder: Path, moment: int) -> None:
    child = os.fork()
    if child == 0:
        steps = count()
        unlink, rename, append = Path.unlink, Path.replace, Journal.append

        def step() -> None:
            if next(steps) == moment:
                os._exit(9)

        def unlinked(self: Path, missing_ok: bool = False) -> None:
            step()
            unlink(self, missing_ok)

        def replaced(self: Path, target: Path) -> Path:
            step()
            return rename(self, target)

        def listed(self: Journal, records: list[dict[str, object]]) -> None:
            step()
            append(self, records)

        try:
            with (
                patch.object(Path, "unlink", unlinked),
                patch.object(Path, "replace", replaced),
                patch.object(Journal, "append", listed),
            ):
                _repair(folder)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_a_flipped_bit_in_another_part_gets_no_new_checksum(tmp_path: Path) -> None:
    samples = {f"s{seed}": invent(30, seed) for seed in range(3)}
    place = place_at(tmp_path)
    write_shard(place, samples, 1)
    (place.folder / "part-00000.safetensors").unlink()
    flip(place.folder / "part-00002.safetensors", -1)
    reopen(place)
    assert write_shard(place, samples, 1) == ["s0", "s2"]


def test_what_is_dropped_is_said_with_the_file_and_the_flaw(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = make_shard(tmp_path, [invent(30, seed) for seed in range(3)], 1)
    place = place_at(tmp_path)
    parts = sorted(folder.glob("part-*"))
    parts[0].unlink()
    _damage(parts[1], "cut")
    flaws = damaged_parts(place)
    assert flaws[parts[0]] == "is missing"
    assert "bytes, expected" in flaws[parts[1]]
    with caplog.at_level(logging.WARNING):
        reopen(place)
    assert "part-00000.safetensors is missing: the samples in it are made again" in caplog.text
    assert "part-00001.safetensors has" in caplog.text


def test_listed_parts_of_another_layout_are_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, manifest = make_shard(tmp_path, [invent(30, 0)])
    reopen(place_at(tmp_path))
    with ShardWriter(folder, LAYOUTS[2], 1, manifest.fingerprint) as writer:
        assert writer.done == set()
    assert "expected ShardLayout" in caplog.text


def test_neither_a_consumed_shard_nor_one_that_is_not_complete_is_damaged(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(30, 0)])
    place = place_at(tmp_path)
    mark_consumed(folder, "c" * 64, 0)
    assert damaged_parts(place) == {}
    (folder / MANIFEST_NAME).unlink()
    for call in (damaged_parts, reopen):
        with pytest.raises(MissingInput):
            call(place)


def test_a_shard_that_somebody_repairs_is_busy(tmp_path: Path) -> None:
    folder, manifest = make_shard(tmp_path, [invent(30, 0)])
    with Journal(folder / JOURNAL_NAME, manifest.fingerprint), pytest.raises(Busy):
        reopen(place_at(tmp_path))


def test_a_shard_that_another_process_mended_meanwhile_keeps_its_new_parts(tmp_path: Path) -> None:
    samples = {f"s{seed}": invent(30, seed) for seed in range(3)}
    place = place_at(tmp_path)
    write_shard(place, samples, 1)
    opened = Journal.__init__

    def mended_before_the_lock(self: Journal, *arguments: Any) -> None:
        with patch.object(Journal, "__init__", opened):
            for part in sorted(place.folder.glob("part-*"))[:2]:
                part.unlink()
            reopen(place)
            write_shard(place, samples, 1 << 20)  # one part of two samples
        opened(self, *arguments)

    with patch.object(Journal, "__init__", mended_before_the_lock):
        reopen(place)
    assert write_shard(place, samples, 1) == []
