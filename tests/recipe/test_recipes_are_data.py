"""A recipe is read as data: nothing in it runs when it is read, nothing is written where it does not say."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.release.names import release_name
from tests.recipes import tiny_recipe

SMALLEST: dict[str, Any] = {
    "name": "tiny",
    "target": {"path": "model"},
    "prompts": {"sources": [{"path": "train.jsonl"}], "count": 4, "per_shard": 2},
    "extraction": {"layers": [1, 2, 3]},
    "evaluation": {"sets": [{"name": "held_out", "path": "evaluation.jsonl"}]},
}


@pytest.mark.parametrize(
    "tag",
    [
        '!!python/object/apply:os.system ["touch ran"]',
        '!!python/object/new:os.system ["touch ran"]',
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object:pathlib.Path {}",
        "!!python/tuple [1, 2]",
        "!ours {}",
    ],
)
@pytest.mark.parametrize(
    "where", ["name: {}", "extends: {}", "server: {{common: {{extra_env: {{A: {} }}}}}}"]
)
def test_a_tag_that_would_make_an_object_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {name: value for name, value in SMALLEST.items() if not where.startswith(name)}
    (tmp_path / "tiny.yaml").write_text(f"{yaml.safe_dump(values)}{where.format(tag)}\n")
    with pytest.raises(RecipeError, match=r"tiny\.yaml cannot be read: could not determine a constructor"):
        load_recipe("tiny", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_tag_in_the_recipe_that_another_extends_is_refused_as_well(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text('name: !!python/object/apply:os.system ["touch ran"]\n')
    (tmp_path / "tiny.yaml").write_text("extends: base.yaml\n")
    with pytest.raises(RecipeError, match=r"base\.yaml cannot be read"):
        load_recipe("tiny", tmp_path)


def test_a_pickle_in_the_place_of_a_recipe_is_no_recipe(tmp_path: Path) -> None:
    import pickle

    (tmp_path / "tiny.yaml").write_bytes(pickle.dumps(SMALLEST))
    with pytest.raises(RecipeError, match=r"tiny\.yaml cannot be read"):
        load_recipe("tiny", tmp_path)


def test_the_project_reads_no_pickle_and_no_yaml_with_tags() -> None:
    """By its source: `yaml.load` has one caller, whose loader is a SafeLoader."""
    root = Path(__file__).parents[2]
    sources = [
        one
        for folder in ("eagle3_pipeline", "assets", "resources", "sensors")
        for one in (root / folder).rglob("*.py")
    ]
    loads = re.compile(
        r"\b(?:pickle|dill|joblib|marshal|shelve)\.\w*|\beval\(|yaml\.(?:unsafe_|full_)?load\("
    )
    found = {
        (path.relative_to(root).as_posix(), call)
        for path in sources
        for call in loads.findall(path.read_text())
    }
    assert {one for one in found if "model.eval(" not in one[1]} == {
        ("eagle3_pipeline/recipe/file.py", "yaml.load(")
    }
    unsafe = [
        path for path in sources if re.search(r"torch\.load\((?!.*weights_only=True)", path.read_text())
    ]
    assert unsafe == []


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/b", "..", "A", "a b"])
def test_a_name_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**SMALLEST, "name": name}))
    with pytest.raises(RecipeError, match="name: String should match pattern"):
        load_recipe("tiny", tmp_path)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/b", "..", "."])
def test_a_release_whose_name_is_a_path_is_refused(tmp_path: Path, tiny_llama: Path, name: str) -> None:
    recipe = load_recipe(str(tiny_recipe(tmp_path, tiny_llama, release={"name": name})), tmp_path)
    with pytest.raises(RecipeError, match="expected one folder name without slashes"):
        release_name(recipe)


def test_what_a_recipe_makes_lies_below_the_storage_root(tmp_path: Path, tiny_llama: Path) -> None:
    recipe = load_recipe(str(tiny_recipe(tmp_path, tiny_llama)), tmp_path)
    lineage = Lineage(recipe, tmp_path / "storage")
    made = [lineage.target_model().folder, lineage.staging]
    for folder in made:
        assert folder.resolve().is_relative_to(tmp_path / "storage" / recipe.slug)


def test_code_of_a_model_runs_only_where_the_recipe_says_so(tmp_path: Path, tiny_llama: Path) -> None:
    assert load_recipe(str(tiny_recipe(tmp_path, tiny_llama)), tmp_path).target.trust_remote_code is False
