"""What a changed setting makes anew is known from the recipe alone, as the places say once it is made."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.asset_settings import settings_version
from eagle3_pipeline.recipe import Recipe, load_recipe
from tests.recipes import tiny_recipe
from tests.test_lineage import CHANGES, END

_ASSETS = (
    *("target_model", "prompts", "synthetic_samples", "sample_audit", "hidden_state_shards"),
    *("vocabulary_map", *END),
)


def _recipe(tmp_path: Path, **changes: Any) -> Recipe:
    model = tmp_path / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    prompts = {"count": 16, **changes.pop("prompts", {})}
    return load_recipe(str(tiny_recipe(tmp_path, model, prompts=prompts, **changes)), tmp_path)


def _versions(recipe: Recipe) -> dict[str, str]:
    return {asset: settings_version(recipe, asset) for asset in _ASSETS}


def _changed(before: Recipe, after: Recipe) -> set[str]:
    old, new = _versions(before), _versions(after)
    return {asset for asset in _ASSETS if old[asset] != new[asset]}


@pytest.mark.parametrize(
    ("changes", "expected"), CHANGES, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_a_setting_changes_the_versions_of_exactly_those_assets_that_it_makes_anew(
    tmp_path: Path, changes: dict[str, Any], expected: set[str]
) -> None:
    before = _recipe(tmp_path)
    after = _recipe(tmp_path, **changes)
    assert _changed(before, after) == {name.split()[0] for name in expected}


def test_more_prompts_change_no_version_of_samples_or_states(tmp_path: Path) -> None:
    before = _recipe(tmp_path)
    train = (tmp_path / "train.jsonl").read_bytes()
    more = _recipe(tmp_path, prompts={"count": 40})
    (tmp_path / "train.jsonl").write_bytes(train)  # tiny_recipe writes more prompts for more
    assert _changed(before, more) == {"prompts", "sample_audit", "vocabulary_map", *END}


def test_a_checkout_that_is_moved_changes_no_version(tmp_path: Path) -> None:
    one = _recipe(tmp_path / "one")
    other = _recipe(tmp_path / "other")
    assert one.prompts.sources[0].path != other.prompts.sources[0].path
    assert _changed(one, other) == set()


def test_a_source_of_another_size_makes_all_anew_but_the_target(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path)
    before = _versions(recipe)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"prompt": "One more?"}\n')
    after = _versions(recipe)
    assert {asset for asset in _ASSETS if before[asset] == after[asset]} == {"target_model"}


def test_waves_change_the_plan_and_the_draft_but_no_state(tmp_path: Path) -> None:
    before = _recipe(tmp_path)
    after = _recipe(tmp_path, extraction={"waves": 2})
    assert _changed(before, after) == {"sample_audit", *END}


def test_a_base_draft_reaches_what_is_made_from_it(tmp_path: Path) -> None:
    before = _recipe(tmp_path)
    after = _recipe(tmp_path, base_draft={"hub_id": "someone/a-draft"})
    assert _changed(before, after) == {"vocabulary_map", *END}
    other = _recipe(tmp_path, base_draft={"hub_id": "someone/another"})
    assert settings_version(after, "base_draft") != settings_version(other, "base_draft")
