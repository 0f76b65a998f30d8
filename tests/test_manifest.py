"""The manifest of a made thing: its existence means complete, and damage is found and named."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.durable_files import sha256_of_file
from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.manifest import MANIFEST_NAME, Place, read_manifest


def _place(folder: Path, **changes: Any) -> Place:
    folder.mkdir(parents=True, exist_ok=True)
    return Place(
        **{"folder": folder, "asset": "prompts", "fingerprint": "f" * 64, "inputs": {"seed": 0}, **changes}
    )


def _made(folder: Path, content: bytes = b"hello") -> Place:
    place = _place(folder)
    (folder / "part").mkdir(exist_ok=True)
    (folder / "part" / "a.bin").write_bytes(content)
    (folder / "b.txt").write_text("b")
    place.finish([folder / "part" / "a.bin", folder / "b.txt"], {"count": 3})
    return place


def test_nothing_is_there_before_the_manifest_is(tmp_path: Path) -> None:
    place = _place(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"half")
    assert place.manifest() is None
    with pytest.raises(
        MissingInput, match=r"^prompts is not made yet: no .*manifest\.json\. Materialise it first\.$"
    ):
        place.require()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="synthetic_samples p2-s001 is not made yet"):
        _place(tmp_path, asset="synthetic_samples", shard="p2-s001").require()


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    place = _made(tmp_path)
    manifest = place.require()
    assert [(entry.path, entry.bytes) for entry in manifest.files] == [("b.txt", 1), ("part/a.bin", 5)]
    assert manifest.facts == {"count": 3}
    assert manifest.inputs == {"seed": 0}
    assert manifest.bytes == 6
    assert manifest.made_by["versions"]["python"]
    assert place.verify() == manifest


def test_the_digest_is_of_the_content_and_not_of_when_or_with_which_facts(tmp_path: Path) -> None:
    one, same, other = (_made(tmp_path / name) for name in ("one", "same", "other"))
    other = _made(tmp_path / "other", b"Hello")
    same.finish([same.folder / "part" / "a.bin", same.folder / "b.txt"], {"count": 4})
    assert one.require().digest == same.require().digest != other.require().digest


def test_the_digest_of_a_model_that_lies_elsewhere_is_of_its_content(tmp_path: Path) -> None:
    def digest(**facts: str) -> str:
        place = _place(tmp_path)
        place.finish([], {"model_path": "/anywhere", **facts})
        return place.require().digest

    assert digest(model_fingerprint="a") == digest(model_fingerprint="a", model_path="/elsewhere")
    assert digest(model_fingerprint="a") != digest(model_fingerprint="b")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_file_changed_in_any_byte_fails_the_verification(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        place = _made(Path(folder), b"0123456789")
        path = place.folder / "part" / "a.bin"
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, 9))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        with pytest.raises(
            DamagedFile, match=r"a\.bin: 10 bytes, expected 10 bytes with checksum [0-9a-f]{12}\. Delete "
        ):
            place.verify()


@pytest.mark.parametrize(
    ("content", "found"), [(None, "None bytes"), (b"hell", "4 bytes"), (b"hello!", "6 bytes")]
)
def test_a_file_of_another_size_fails_the_verification(
    tmp_path: Path, content: bytes | None, found: str
) -> None:
    place = _made(tmp_path)
    path = tmp_path / "part" / "a.bin"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DamagedFile, match=f"{found}, expected 5 bytes"):
        place.verify()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_manifest_torn_at_any_byte_is_never_taken_for_whole(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = _made(Path(folder)).folder / MANIFEST_NAME
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2))])
        with pytest.raises(DamagedFile, match=r"is not a manifest .* Delete it to make the thing again"):
            read_manifest(path)


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"digest": "x", "files": [3]}', "\udcff"])
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DamagedFile, match="is not a manifest"):
        read_manifest(tmp_path / MANIFEST_NAME)


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"digest": "0" * 64},
        {"digest": None},
        {"fingerprint": "0" * 64},
        {"shard": "p2-s000"},
        {"files": [{"path": "b.txt", "bytes": 1, "sha256": "0"}]},
    ],
)
def test_an_edited_manifest_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    place = _made(tmp_path)
    _edit(tmp_path / MANIFEST_NAME, **changes)
    with pytest.raises(
        DamagedFile, match=r"format \d with digest .*, expected format 1 with digest [0-9a-f]{12}\. Delete"
    ):
        place.manifest()


def test_a_folder_that_was_moved_by_hand_is_refused(tmp_path: Path) -> None:
    _made(tmp_path / "ffff")
    (tmp_path / "ffff").rename(tmp_path / "eeee")
    moved = _place(tmp_path / "eeee", fingerprint="e" * 64)
    with pytest.raises(
        DamagedFile, match=r"is of prompts f{12} , expected prompts e{12} \. Was the folder moved"
    ):
        moved.manifest()


def test_a_checksum_that_is_known_is_taken_and_the_others_are_made(tmp_path: Path) -> None:
    place = _made(tmp_path)
    files = [tmp_path / "part" / "a.bin", tmp_path / "b.txt"]
    place.finish(files, {}, checksums={files[0]: "a" * 64})
    entries = place.require().files
    assert (entries[0].sha256, entries[1].sha256) == (sha256_of_file(files[1]), "a" * 64)
