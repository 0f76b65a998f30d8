"""The base draft: found or fetched, and held against target and layers before anything is extracted."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_pipeline import model_place
from eagle3_pipeline.base_draft import make_base_draft, require_base_layers
from eagle3_pipeline.errors import BadInput, MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.target import make_target
from tests.drafts import make_draft
from tests.recipes import tiny_recipe

_LAYERS = [1, 2, 3, 4]


def _lineage(tmp_path: Path, target: Path, **changes: Any) -> Lineage:
    settings = {
        "base_draft": {"path": str(tmp_path / "draft")},
        "extraction": {"layers": _LAYERS},
        **changes,
    }
    recipe = load_recipe(str(tiny_recipe(tmp_path / "recipe", target, **settings)), tmp_path)
    lineage = Lineage(recipe, tmp_path / "storage")
    make_target(lineage)
    return lineage


def _change(folder: Path, **config: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def test_its_layers_and_vocabulary_are_known_once_it_is_there(tmp_path: Path, tiny_llama: Path) -> None:
    folder = make_draft(tmp_path / "draft", tiny_llama)
    lineage = _lineage(tmp_path, tiny_llama)
    facts = make_base_draft(lineage).facts
    assert facts["layers"] == [1, 2, 3]
    assert facts["draft_tokens"] == 512
    assert lineage.base_draft_path() == folder


def test_one_edited_in_place_is_another_one(tmp_path: Path, tiny_llama: Path) -> None:
    make_draft(tmp_path / "draft", tiny_llama)
    lineage = _lineage(tmp_path, tiny_llama)
    before = make_base_draft(lineage)
    make_draft(tmp_path / "draft", tiny_llama, looks_back=False)
    after = make_base_draft(lineage)
    assert before.fingerprint != after.fingerprint
    assert before.facts["model_fingerprint"] != after.facts["model_fingerprint"]


def test_other_layers_than_are_extracted_are_refused_also_where_it_was_made_before(
    tmp_path: Path, tiny_llama: Path
) -> None:
    make_draft(tmp_path / "draft", tiny_llama)
    make_base_draft(_lineage(tmp_path, tiny_llama))
    other = _lineage(tmp_path, tiny_llama, extraction={"layers": [2, 3, 4]})
    for refused in (make_base_draft, require_base_layers):
        with pytest.raises(BadInput, match=r"draws on the layers \[1, 2, 3\].*set it to \[1, 2, 3, 4\]"):
            refused(other)


def test_one_whose_layers_are_counted_by_their_output_is_taken_as_it_was_trained(
    tmp_path: Path, tiny_llama: Path
) -> None:
    make_draft(tmp_path / "draft", tiny_llama)
    base = {"path": str(tmp_path / "draft"), "layers_counted": "output"}
    _change(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    assert make_base_draft(_lineage(tmp_path, tiny_llama, base_draft=base)).facts["layers"] == [1, 2, 3]


def test_what_fits_nothing_is_refused_with_the_list_and_leaves_no_manifest(
    tmp_path: Path, tiny_llama: Path
) -> None:
    folder = make_draft(tmp_path / "draft", tiny_llama)
    save_file({"lm_head.weight": torch.zeros(512, 64), "x.y": torch.zeros(2)}, folder / "model.safetensors")
    lineage = _lineage(tmp_path, tiny_llama)
    with pytest.raises(BadInput, match=r"does not fit: missing \['fc\.weight'.*unknown \['x\.y'\]"):
        make_base_draft(lineage)
    save_file({"x.y": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(BadInput, match="fits nowhere"):
        make_base_draft(lineage)
    assert lineage.base_draft().manifest() is None


def test_a_draft_for_a_target_of_another_size_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    folder = make_draft(tmp_path / "draft", tiny_llama)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "fc.weight": torch.zeros(64, 96)}, folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"fc\.weight \[64, 96\] for \[64, 192\]"):
        make_base_draft(_lineage(tmp_path, tiny_llama))


def test_pickles_are_refused_with_a_word_also_where_nothing_else_is_there(
    tmp_path: Path, tiny_llama: Path
) -> None:
    folder = make_draft(tmp_path / "draft", tiny_llama)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"only pickles \(pytorch_model\.bin\).*convert them once"):
        make_base_draft(_lineage(tmp_path, tiny_llama))
    shutil.rmtree(folder)
    with pytest.raises(BadInput, match=r"is no draft: it has no \*\.safetensors"):
        make_base_draft(_lineage(tmp_path, tiny_llama))


def test_an_emptied_cache_is_filled_again_with_the_same_commit(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []

    def fetch(hub_id: str, revision: str, beside: tuple[str, ...]) -> Path:
        asked.append((revision, beside))
        return make_draft(tmp_path / "cache" / "snapshots" / ("c" * 40), tiny_llama)

    monkeypatch.setattr(model_place, "download", fetch)
    lineage = _lineage(tmp_path, tiny_llama, base_draft={"hub_id": "someone/a-draft"})
    made = make_base_draft(lineage)
    assert made.facts["revision"] == "c" * 40
    shutil.rmtree(tmp_path / "cache")
    assert make_base_draft(lineage).digest == made.digest
    assert asked == [("main", ("config.json",)), ("c" * 40, ("config.json",))]


def test_what_others_fetched_into_the_cache_makes_no_other_draft(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_draft(tmp_path / "cache" / "snapshots" / ("c" * 40), tiny_llama)
    monkeypatch.setattr(model_place, "download", lambda *_: folder)
    changes = {"base_draft": {"hub_id": "someone/a-draft"}}
    alone = make_base_draft(_lineage(tmp_path / "a", tiny_llama, **changes))
    save_file({"optimizer.step": torch.zeros(2)}, folder / "another.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    beside = make_base_draft(_lineage(tmp_path / "b", tiny_llama, **changes))
    assert beside.facts == alone.facts
    _change(folder, norm_output=True)
    edited = make_base_draft(_lineage(tmp_path / "c", tiny_llama, **changes))
    assert edited.facts["model_fingerprint"] != alone.facts["model_fingerprint"]


def test_it_is_held_against_the_target_so_that_must_be_there(tmp_path: Path, tiny_llama: Path) -> None:
    make_draft(tmp_path / "draft", tiny_llama)
    lineage = _lineage(tmp_path, tiny_llama)
    shutil.rmtree(tmp_path / "storage")
    with pytest.raises(MissingInput, match="target_model is not made yet"):
        make_base_draft(lineage)
