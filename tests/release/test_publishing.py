"""Versions of a release: their numbers, and copies in a folder."""

import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3_pipeline.errors import BadInput, Busy, DamagedFile, MissingInput, NotEnoughRoom, RecipeError
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.release import folder_copy
from eagle3_pipeline.release.publishing import home_of, plan_of_publishing, publish
from eagle3_pipeline.release.versions import number_release, numbers, numbers_in
from tests.recipes import tiny_recipe
from tests.release.finished import FILES, NAME, content_of, finished
from tests.release.made import made_lineage, make_checkpoint, make_report


def moved(message: str) -> None:
    """Do what a refusal says."""
    subprocess.run(shlex.split(message[message.index("mv ") :]), check=True)


def copy_below(root: Path) -> Path:
    return root / "shared" / NAME


def test_each_new_release_gets_the_next_version_and_latest_leads_to_it(tmp_path: Path) -> None:
    first = finished(tmp_path)
    assert publish(first)["version"] == "v1"
    second = finished(tmp_path, {**FILES, "README.md": b"other"}, license="mit")
    found = publish(second)
    home = home_of(first)
    assert found == {"version": "v2", "released": str(home / "v2")}
    assert (home / "latest").resolve() == second.released_draft().folder
    assert (home / "v1").resolve() == first.released_draft().folder
    assert not any((home / name).readlink().is_absolute() for name in ("v1", "v2", "latest"))


def test_the_same_content_never_gets_a_second_version(tmp_path: Path) -> None:
    lineage = finished(tmp_path)
    assert [publish(lineage)["version"] for _ in range(2)] == ["v1", "v1"]
    again = finished(tmp_path, license="mit")  # other settings that lead to the same files
    assert publish(again)["version"] == "v1"
    assert numbers_in(home_of(lineage)) == [1]


def test_a_release_that_was_deleted_leaves_its_number_taken(tmp_path: Path) -> None:
    first = finished(tmp_path)
    publish(first)
    shutil.rmtree(first.released_draft().folder)
    assert publish(finished(tmp_path, {"a": b"1"}, license="mit"))["version"] == "v2"


def test_latest_never_goes_back(tmp_path: Path) -> None:
    first, second = finished(tmp_path), finished(tmp_path, {"a": b"1"}, license="mit")
    for lineage in (first, second, first):
        publish(lineage)
    assert str((home_of(first) / "latest").readlink()) == "v2"


@pytest.mark.parametrize("step", ["symlink_to", "replace"])
def test_a_kill_before_a_link_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    lineage = finished(tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, step, killed)
        with pytest.raises(KeyboardInterrupt):
            publish(lineage)
    assert publish(lineage)["version"] == "v1"
    assert (home_of(lineage) / "latest").resolve() == lineage.released_draft().folder


def test_releases_that_are_numbered_at_once_get_a_number_each(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(12)]
    for folder in folders:
        folder.mkdir()
        (folder / "SHA256SUMS").write_text(folder.name)
    home = tmp_path / "home"
    with multiprocessing.get_context("fork").Pool(len(folders)) as pool:
        versions = pool.starmap(number_release, [(home, "name", folder, ()) for folder in folders], 1)
    assert sorted(one.number for one in versions) == list(range(1, 13))
    assert str((home / "latest").readlink()) == "v12"
    assert all((home / one.tag).resolve() == one.folder for one in versions)


def test_numbers_are_those_of_versions_alone_and_in_their_order() -> None:
    assert numbers(["v10", "v9", "latest", ".v3.tmp", "v0", "v02", "v1-old", "V4", "4"]) == [9, 10]


@pytest.mark.parametrize("name", ["", "latest"])
def test_what_stands_in_the_place_of_versions_is_left_alone(tmp_path: Path, name: str) -> None:
    lineage = finished(tmp_path)
    mine = home_of(lineage) / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(DamagedFile, match=r"no folder of versions|no link of ours"):
        publish(lineage)
    assert mine.read_text() == "mine"


def test_a_release_that_somebody_edited_is_not_published(tmp_path: Path) -> None:
    lineage = finished(tmp_path, folder=str(tmp_path / "shared"))
    (lineage.released_draft().folder / "README.md").write_text("edited")
    with pytest.raises(DamagedFile, match=r"README\.md"):
        publish(lineage)
    assert not (tmp_path / "shared").exists()
    assert numbers_in(home_of(lineage)) == []


def test_without_a_release_nothing_is_published(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path)
    make_checkpoint(lineage, weights=False)
    make_report(lineage)
    for call in (publish, plan_of_publishing):
        with pytest.raises(MissingInput, match="released_draft is not made yet"):
            call(lineage)


@pytest.mark.parametrize("name", ["a/b", "..", "/x"])
def test_a_release_name_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=r"release\.name"):
        publish(finished(tmp_path, name=name))


def test_a_folder_gets_a_whole_copy_of_each_version(tmp_path: Path) -> None:
    first = finished(tmp_path, folder=str(tmp_path / "shared"))
    where = publish(first)
    copy = copy_below(tmp_path) / "v1"
    assert where["copy"] == str(copy)
    assert content_of(copy) == FILES
    assert {path.stat().st_nlink for path in copy.rglob("*") if path.is_file()} == {1}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=copy, check=True)
    second = finished(tmp_path, {"a": b"1"}, license="mit", folder=str(tmp_path / "shared"))
    publish(second)
    assert content_of(copy_below(tmp_path) / "latest") == {"a": b"1"}
    assert content_of(copy) == FILES


def test_a_folder_in_a_recipe_lies_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    path = tiny_recipe(tmp_path, tmp_path / "model", release={"folder": "shared"})
    assert load_recipe(str(path), tmp_path).release.folder == tmp_path / "shared"


def test_where_it_is_published_does_not_make_another_release(tmp_path: Path) -> None:
    lineage = finished(tmp_path)
    publish(lineage)
    settings = {"folder": str(tmp_path / "shared"), "publish": {"hub_id": "me/a-draft"}}
    elsewhere = made_lineage(tmp_path, release=settings)
    assert elsewhere.released_draft().manifest() == lineage.released_draft().manifest()


@pytest.mark.parametrize("after", range(len(FILES) + 1))
def test_a_copy_has_its_name_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    lineage = finished(tmp_path, folder=str(tmp_path / "shared"))
    count, copyfile = itertools.count(), shutil.copyfile

    def killed_some_time(source: Path, target: Path) -> None:
        if next(count) == after:
            raise KeyboardInterrupt
        copyfile(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(folder_copy.shutil, "copyfile", killed_some_time)
        # As a kill does it: nothing is cleared up.
        patch.setattr(folder_copy.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            publish(lineage)
    assert numbers_in(copy_below(tmp_path)) == []
    assert not (copy_below(tmp_path) / "latest").is_symlink()
    publish(lineage)
    assert content_of(copy_below(tmp_path) / "v1") == FILES
    assert {path.name for path in copy_below(tmp_path).iterdir()} == {"v1", "latest", ".lock"}


@pytest.mark.parametrize("at_once", [False, True], ids=["midway", "known before"])
def test_a_full_disk_ends_a_copy_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    lineage = finished(tmp_path, folder=str(tmp_path / "shared"))

    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if at_once:
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        patch.setattr(folder_copy.shutil, "copyfile", full)
        with pytest.raises(NotEnoughRoom, match=r"name another release\.folder"):
            publish(lineage)
    assert {path.name for path in copy_below(tmp_path).iterdir()} == {".lock"}
    assert numbers_in(home_of(lineage)) == [1]
    assert publish(lineage)["copy"] == str(copy_below(tmp_path) / "v1")


def test_a_copy_that_is_not_what_was_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = finished(tmp_path, folder=str(tmp_path / "shared"))
    monkeypatch.setattr(folder_copy.shutil, "copyfile", lambda _, target: target.write_bytes(b"rot"))
    with pytest.raises(DamagedFile, match="is not what was copied"):
        publish(lineage)
    assert numbers_in(copy_below(tmp_path)) == []


def test_a_version_of_other_content_is_never_written_over_and_the_message_is_the_way_out(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "shared")
    publish(finished(tmp_path / "one", folder=folder))
    other = finished(tmp_path / "other", {"a": b"1"}, folder=folder)
    for call in (publish, plan_of_publishing):
        with pytest.raises(BadInput, match="v1 is another release") as refusal:
            call(other)
    assert content_of(copy_below(tmp_path) / "v1") == FILES
    moved(str(refusal.value))
    assert publish(other)["version"] == "v2"
    assert content_of(copy_below(tmp_path) / "v2") == {"a": b"1"}
    assert str((home_of(other) / "latest").readlink()) == "v2"


def test_a_second_process_does_not_copy_to_the_same_place(tmp_path: Path) -> None:
    lineage = finished(tmp_path, folder=str(tmp_path / "shared"))
    copy_below(tmp_path).mkdir(parents=True)
    with (copy_below(tmp_path) / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="is being published to"):
            publish(lineage)
    publish(lineage)


def test_a_plan_says_what_is_new_and_changes_nothing(tmp_path: Path) -> None:
    lineage = finished(tmp_path, folder=str(tmp_path / "shared"))
    new, copy = plan_of_publishing(lineage)
    assert new == f"{home_of(lineage) / 'v1'}: a new version"
    assert copy == f"{copy_below(tmp_path) / 'v1'}: a copy of 7 files, 0.0 MB"
    assert not home_of(lineage).exists()
    assert not (tmp_path / "shared").exists()
    publish(lineage)
    assert all(line.endswith(": is there") for line in plan_of_publishing(lineage))
