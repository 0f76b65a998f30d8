import errno
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline import manifest as manifest_module
from eagle3_pipeline.errors import Busy
from eagle3_pipeline.journal import Journal, read_journal
from eagle3_pipeline.shards import part as part_module
from eagle3_pipeline.shards.format import read_header
from eagle3_pipeline.shards.listing import JOURNAL_NAME
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.shards.writer import ShardWriter
from tests.shards.build import LAYOUT, Invented, invent, make_shard, place_at, same


def _write_all(folder: Path, samples: list[Invented], part_bytes: int) -> None:
    place = place_at(folder)
    with ShardWriter(place.folder, LAYOUT, part_bytes, place.fingerprint) as writer:
        for number, sample in enumerate(samples):
            if f"s{number}" not in writer.done:
                writer.add(f"s{number}", **sample)
        parts = writer.complete()
        place.finish(parts, {}, checksums=parts)
        writer.close(finished=True)


def _write_until_killed(folder: Path, samples: list[Invented], part_bytes: int, moment: int) -> None:
    """Write the shard in a child process that ends, without any clean-up, at the given step."""
    child = os.fork()
    if child == 0:
        steps = iter(range(10_000))

        def step() -> None:
            if next(steps) == moment:
                os._exit(9)

        rename, append = Path.replace, Journal.append

        def replace(self: Path, target: Path) -> Path:
            step()
            return rename(self, target)

        def listed(self: Journal, records: list[dict[str, object]]) -> None:
            step()
            append(self, records)
            step()

        try:
            with patch.object(Path, "replace", replace), patch.object(Journal, "append", listed):
                _write_all(folder, samples, part_bytes)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    part_bytes=st.integers(1, 6_000),
    moments=st.lists(st.integers(0, 20), max_size=3),
)
def test_a_kill_between_any_two_files_leaves_no_half_listed_part_and_is_gone_on_from(
    lengths: list[int], part_bytes: int, moments: list[int]
) -> None:
    samples = [invent(tokens, seed) for seed, tokens in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shard = place_at(folder).folder
        for moment in moments:
            if (shard / "manifest.json").exists():
                break
            _write_until_killed(folder, samples, part_bytes, moment)
            if (shard / JOURNAL_NAME).exists():
                for record in read_journal(shard / JOURNAL_NAME):
                    assert read_header(shard / str(record.get("part"))).file_bytes == record["bytes"]
        if not (shard / "manifest.json").exists():
            _write_all(folder, samples, part_bytes)
        place_at(folder).verify()
        reader = ShardReader([shard])
        assert sorted(reader.sample_ids) == sorted(f"s{number}" for number in range(len(samples)))
        for index, sample_id in enumerate(reader.sample_ids):
            assert same(reader[index], samples[int(sample_id[1:])])
        assert not [path for path in shard.iterdir() if path.name.startswith(".part-")]


def test_listed_parts_are_kept_byte_for_byte_and_only_missing_samples_are_asked_for(tmp_path: Path) -> None:
    samples = [invent(30, seed) for seed in range(4)]
    _write_until_killed(tmp_path, samples, 1, moment=3 * 2 + 1)  # the header of the journal is a rename, too
    shard = place_at(tmp_path).folder
    before = {
        record["part"]: (shard / record["part"]).stat() for record in read_journal(shard / JOURNAL_NAME)
    }
    assert before
    with ShardWriter(shard, LAYOUT, 1, place_at(tmp_path).fingerprint) as writer:
        assert writer.done == {f"s{number}" for number in range(len(before))}
    _write_all(tmp_path, samples, 1)
    for name, stat in before.items():
        assert (shard / name).stat().st_mtime_ns == stat.st_mtime_ns
    assert len(ShardReader([shard])) == 4


def test_a_full_disk_leaves_the_parts_before_it_and_nothing_of_the_one_that_did_not_fit(
    tmp_path: Path,
) -> None:
    samples = [invent(30, seed) for seed in range(3)]
    write, calls = part_module._write_tensor, iter(range(1000))

    def full(file: io.BufferedWriter, tensor: object) -> None:
        if next(calls) == 6:  # four tensors in a part of one sample: the second part, within its tensors
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, tensor)  # type: ignore[arg-type]

    place = place_at(tmp_path)
    with (
        patch.object(part_module, "_write_tensor", full),
        pytest.raises(OSError, match="No space left"),
    ):
        _write_all(tmp_path, samples, 1)
    names = {path.name for path in place.folder.iterdir()}
    assert names == {"part-00000.safetensors", JOURNAL_NAME, JOURNAL_NAME + ".lock"}
    assert [record["part"] for record in read_journal(place.folder / JOURNAL_NAME)] == [
        "part-00000.safetensors"
    ]
    _write_all(tmp_path, samples, 1)
    assert len(ShardReader([place.folder])) == 3


def test_two_writers_of_one_shard_exclude_each_other(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, LAYOUT, 1, "f" * 64), pytest.raises(Busy, match="another process"):
        ShardWriter(tmp_path, LAYOUT, 1, "f" * 64)


def test_a_complete_shard_is_never_opened_for_writing(tmp_path: Path) -> None:
    folder, manifest = make_shard(tmp_path, [invent(3, 0)])
    before = {path.name: path.read_bytes() for path in folder.glob("part-*")}
    with pytest.raises(Busy, match="left as it is"):
        ShardWriter(folder, LAYOUT, 1, manifest.fingerprint)
    assert {path.name: path.read_bytes() for path in folder.glob("part-*")} == before


def test_parts_of_another_thing_are_not_continued(tmp_path: Path) -> None:
    _write_until_killed(tmp_path, [invent(30, seed) for seed in range(3)], 1, moment=7)
    shard = place_at(tmp_path).folder
    with ShardWriter(shard, LAYOUT, 1, "e" * 64) as writer:
        assert writer.done == set()


@pytest.mark.parametrize("moment", range(1, 4))
def test_a_kill_while_parts_are_given_up_leaves_none_of_them_listed(moment: int, tmp_path: Path) -> None:
    place = place_at(tmp_path)
    unlink, steps = Path.unlink, iter(range(1000))

    def killed(self: Path, missing_ok: bool = False) -> None:
        if next(steps) == moment:
            raise KeyboardInterrupt
        unlink(self, missing_ok)

    with ShardWriter(place.folder, LAYOUT, 1, place.fingerprint) as writer:
        for number in range(3):
            writer.add(f"s{number}", **invent(30, number))
        writer.complete()
        with patch.object(Path, "unlink", killed), pytest.raises(KeyboardInterrupt):
            writer.give_up()
    with ShardWriter(place.folder, LAYOUT, 1, place.fingerprint) as writer:
        assert writer.done == set()
    assert not list(place.folder.glob("*part-*"))


@pytest.mark.parametrize("end", [ShardWriter.give_up, lambda writer: writer.close(finished=True)])
def test_a_journal_that_another_process_removed_is_not_missed(
    end: Callable[[ShardWriter], None], tmp_path: Path
) -> None:
    with ShardWriter(tmp_path, LAYOUT, 1, "f" * 64) as writer:
        (tmp_path / JOURNAL_NAME).unlink()
        end(writer)


def test_no_part_is_read_again_for_its_checksum_whichever_run_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(manifest_module, "sha256_of_file", read)
    samples = [invent(30, seed) for seed in range(4)]
    _write_until_killed(tmp_path, samples, 1, moment=3 * 2 + 1)
    assert list(place_at(tmp_path).folder.glob("part-*"))
    _write_all(tmp_path, samples, 1)
    monkeypatch.undo()
    assert len(place_at(tmp_path).verify().files) == 4
