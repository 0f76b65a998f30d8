"""Reading recipes from YAML: `extends`, where a name is looked up, and messages for people."""

import difflib
import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from eagle3_pipeline.errors import BadInput, RecipeError
from eagle3_pipeline.model_folder import read_config
from eagle3_pipeline.recipe.server import PHASES
from eagle3_pipeline.recipe.settings import Recipe

RECIPES_VARIABLE = "EAGLE3_RECIPES"
DEFAULT_RECIPE = "smollm2-cpu"


def load_recipes(folder: Path) -> tuple[Recipe, ...]:
    """The recipes named in EAGLE3_RECIPES (separated by commas), or the default one; raises RecipeError."""
    names = [name.strip() for name in os.environ.get(RECIPES_VARIABLE, "").split(",") if name.strip()]
    recipes = tuple(load_recipe(name, folder) for name in names or [DEFAULT_RECIPE])
    slugs = [recipe.slug for recipe in recipes]
    for slug in slugs:
        if slugs.count(slug) > 1:
            same = [recipe.name for recipe in recipes if recipe.slug == slug]
            raise RecipeError(
                f"recipes {same} have the same slug {slug}: asset keys would collide. Rename one."
            )
    return recipes


def load_recipe(name: str, folder: Path) -> Recipe:
    """Read the recipe at path `name`, or called so in `folder`/local or `folder`; raises RecipeError.

    A recipe in `local/` (not under version control) takes precedence over one of the same name.
    Relative paths in a recipe are relative to the file that they are written in.
    """
    path = _find(name, folder)
    values = _read(path)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise _refusal(path, _problems(error.errors())) from error
    if problems := [*_problems_with_prompts(recipe), *_problems_with_target(recipe)]:
        raise _refusal(path, problems)
    return recipe


def _refusal(path: Path, problems: list[str]) -> RecipeError:
    return RecipeError("\n  ".join([f"{path} is refused:", *problems]))


def _find(name: str, folder: Path) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if path.is_file():
            return path
        raise RecipeError(f"no recipe file {path.absolute()}")
    for path in (folder / "local" / f"{name}.yaml", folder / f"{name}.yaml"):
        if path.is_file():
            return path
    known = sorted({path.stem for path in [*folder.glob("*.yaml"), *folder.glob("local/*.yaml")]})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise RecipeError(f"no recipe {name!r} in {folder}.{hint} There are: {', '.join(known) or 'none'}.")


class _OnceOnlyLoader(yaml.SafeLoader):
    """YAML without the freedom to give a key twice in a block, of which the last one would win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for (place, _), key in zip(node.value, keys, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", place.start_mark
                )
        return super().construct_mapping(node, deep)


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    try:
        values: Any = yaml.load(path.read_text("utf-8"), _OnceOnlyLoader)  # a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: expected a block of settings, found {type(values).__name__}")
    _anchor_paths(values, path.parent)
    if (parent := values.pop("extends", None)) is None:
        return values
    base = path.parent / str(parent)
    if base.resolve() in seen:
        raise RecipeError(f"{path}: extends runs in a circle through {base}")
    if not base.is_file():
        raise RecipeError(f"{path}: extends {parent!r}, but there is no file {base}")
    return _merge(_read(base, (*seen, path.resolve())), values)


def _anchor_paths(value: Any, folder: Path) -> None:
    """Make each `path`, `folder` and `python` absolute, in place, while it is known where it stood."""
    if isinstance(value, dict):
        for key in ("path", "folder"):
            if isinstance(value.get(key), str):
                value[key] = str((folder / value[key]).resolve())
        if isinstance(value.get("python"), str):
            # A virtual environment's link must be called by its own name, so only the folder is resolved.
            value["python"] = str(folder.resolve() / value["python"])
        for key, child in value.items():
            if key != "extra_env":
                _anchor_paths(child, folder)
    elif isinstance(value, list):
        for child in value:
            _anchor_paths(child, folder)


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        both_blocks = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_blocks else value
    return merged


def _problems(details: list[ErrorDetails]) -> list[str]:
    """What is wrong, each said once: what stood in server.common fails in each of the three phases."""
    wrong = [detail["loc"] for detail in details]
    problems: dict[str, None] = {}
    for detail in details:
        location = detail["loc"]
        # A list whose only entry is wrong is reported as too short as well.
        if detail["type"] == "too_short" and any(
            len(one) > len(location) and one[: len(location)] == location for one in wrong
        ):
            continue
        if location[:1] == ("server",) and all(("server", one, *location[2:]) in wrong for one in PHASES):
            location = ("server", "common", *location[2:])
        problems[_explain({**detail, "loc": location})] = None
    return list(problems)


def _problems_with_prompts(recipe: Recipe) -> list[str]:
    """What keeps a run from having prompts that train beside those that judge."""
    prompts, shards = recipe.prompts, len(recipe.shards)
    if (taken := shards * prompts.per_shard) > prompts.validation_prompts:
        return []
    return [
        f"prompts: a run of {shards} x prompts.per_shard = {taken} judges the draft with all its prompts "
        "(prompts.validation) and trains it with none: raise run.shards, prompts.count or per_shard"
    ]


def _problems_with_target(recipe: Recipe) -> list[str]:
    """What keeps a target on this disk from being served as the recipe says; said once if in all phases.

    Any other target is judged when it is there, before its first server starts.
    """
    from eagle3_pipeline.serving.parallelism import check_parallel  # serving builds on recipes

    folder = recipe.target.path
    if folder is None or not (folder / "config.json").is_file():
        return []
    try:
        config = read_config(folder)
    except BadInput as error:
        return [f"target.path: {error}"]
    problems: dict[str, str] = {}
    for phase in PHASES:
        try:
            check_parallel(recipe.server.phase(phase), config, phase)
        except RecipeError as error:
            problems[phase] = str(error)
    shared = {text.replace(f"server.{phase}", "server.common") for phase, text in problems.items()}
    return list(shared if len(problems) == len(PHASES) and len(shared) == 1 else problems.values())


def _explain(detail: ErrorDetails) -> str:
    place = ".".join(str(part) for part in detail["loc"]) or "recipe"
    if detail["type"] != "extra_forbidden":
        found = "" if detail["type"] in ("missing", "value_error") else f", found {detail['input']!r}"
        return f"{place}: {detail['msg'].removeprefix('Value error, ')}{found}"
    key = str(detail["loc"][-1])
    valid = _valid_keys(detail["loc"][:-1])
    close = difflib.get_close_matches(key, valid, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{place}: unknown key.{hint} Valid keys: {', '.join(valid)}"


def _valid_keys(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        part = PHASES[0] if part == "common" else part
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel))
    extra = ["common"] if model.__name__ == "Servers" else ["extends"] if model is Recipe else []
    return sorted([*model.model_fields, *extra])
