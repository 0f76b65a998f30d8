"""Recipes: strict, with messages that name the place, the reason and the way out."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.recipe import Recipe, load_recipe, load_recipes
from eagle3_pipeline.recipe.extraction import Extraction
from eagle3_pipeline.recipe.file import RECIPES_VARIABLE

TRACKED = Path(__file__).parents[2] / "recipes"

_SMALLEST: dict[str, Any] = {
    "name": "tiny",
    "target": {"path": "model"},
    "prompts": {"sources": [{"path": "train.jsonl"}], "count": 4, "per_shard": 2},
    "extraction": {"layers": [1, 2, 3]},
    "evaluation": {"sets": [{"name": "held_out", "path": "evaluation.jsonl"}]},
}


def _write(folder: Path, recipe: dict[str, Any], file: str = "tiny") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def _with(dotted: str, value: Any) -> dict[str, Any]:
    """The smallest recipe with one setting, named as `section.key`, changed."""
    *sections, key = dotted.split(".")
    recipe = dict(_SMALLEST)
    block = recipe
    for section in sections:
        block[section] = dict(block.get(section, {}))
        block = block[section]
    block[key] = value
    return recipe


def _refusal(folder: Path, recipe: dict[str, Any]) -> list[str]:
    """The lines of the refusal, below the one with the file's name."""
    path = _write(folder, recipe)
    with pytest.raises(RecipeError) as caught:
        load_recipe("tiny", folder)
    first, *problems = str(caught.value).splitlines()
    assert first == f"{path} is refused:"
    return [problem.removeprefix("  ") for problem in problems]


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "prompts.cuont",
            4,
            "prompts.cuont: unknown key. Did you mean count? Valid keys: count, max_prompt_tokens, "
            "near_duplicate_similarity, per_shard, seed, sources, validation",
        ),
        (
            "prompts.sources",
            [{"path": "a", "colum": "x"}],
            "prompts.sources.0.colum: unknown key. Did you mean column? Valid keys: column, dataset, path, "
            "revision, split, subset, weight",
        ),
        (
            "prompts.count",
            5,
            "prompts: count 5 is not a multiple of per_shard 2, so the last shard would change when the "
            "count is raised: use 4 or 6",
        ),
        ("prompts.count", "4", "prompts.count: Input should be a valid integer, found '4'"),
        ("prompts.count", True, "prompts.count: Input should be a valid integer, found True"),
        (
            "prompts.sources",
            [],
            "prompts.sources: Tuple should have at least 1 item after validation, not 0, found []",
        ),
        (
            "prompts.sources",
            [{"path": "a", "dataset": "b"}],
            "prompts.sources.0: exactly one of path and dataset is wanted",
        ),
        ("prompts", None, "prompts: Input should be a valid dictionary or instance of Prompts, found None"),
        (
            "extraction.layers",
            [2, 1],
            "extraction: [2, 1] must rise strictly and start at 1 or above (0 is the embedding, which the "
            "draft has already)",
        ),
        (
            "target",
            {"path": "a", "hub_id": "b"},
            "target: exactly one of path, hub_id and package is wanted, found ['path', 'hub_id']",
        ),
        ("base_draft", {}, "base_draft: exactly one of path and hub_id is wanted"),
        ("run.shards", 3, "recipe: run.shards is 3, the plan has 2 shards"),
        (
            "server.generation.max_model_len",
            1000,
            "recipe: prompts.max_prompt_tokens + generation.max_completion_tokens is 1536, more than "
            "server.generation.max_model_len 1000",
        ),
        ("name", "Tiny X", "name: String should match pattern '^[a-z0-9][a-z0-9._-]*$', found 'Tiny X'"),
        (
            "generation.temperature",
            3,
            "generation.temperature: Input should be less than or equal to 2, found 3",
        ),
        ("partitions.generation", "3-1", "partitions.generation: the range 3-1 runs backwards"),
        (
            "partitions.generation",
            "gpu",
            "partitions.generation: 'gpu' is no GPU: write cpu, an index, a range like 0-7, or a UUID "
            "(GPU-..., MIG-...)",
        ),
        ("partitions.generation", [0, "0"], "partitions.generation: the same GPU twice in ['0', '0']"),
        (
            "partitions.generation",
            [],
            "partitions.generation: an empty list of GPUs: write cpu for a machine without GPUs",
        ),
        (
            "partitions.generation",
            "0-7",
            "recipe: server.generation: tensor_parallel x pipeline_parallel x data_parallel = 1, but "
            "partitions.generation has 8 GPUs: make both 8, or take fewer GPUs",
        ),
        (
            "server.evaluation.expert_parallel",
            True,
            "recipe: server.evaluation: expert_parallel wants tensor_parallel or data_parallel above 1: "
            "stages of pipeline_parallel share no experts",
        ),
        (
            "server.extraction.extra_args",
            ["--enable-prefix-caching"],
            "server: server.extraction.extra_args: --enable-prefix-caching is forbidden in extraction: "
            "tokens in the cache are not computed again, so their states would be missing",
        ),
        (
            "server.common.extra_args",
            ["--tensor_parallel_size=2"],
            "server.common.extra_args: --tensor_parallel_size (--tensor-parallel-size) is not for "
            "extra_args: use the setting tensor_parallel",
        ),
        (
            "server.generation.extra_args",
            ["--api-key=geheim"],
            "server.generation.extra_args: --api-key is not for extra_args: a key shows in ps and locks out "
            "our own requests; no server listens to other machines",
        ),
        (
            "server.common.extra_env",
            {"VLLM_ENGINE_READY_TIMEOUT_S": "600"},
            "server.common: extra_env sets VLLM_ENGINE_READY_TIMEOUT_S to '600', expected whole seconds, "
            "and no fewer than start_timeout_s 1800: vLLM would give up first. Leave it out: it follows "
            "start_timeout_s",
        ),
        ("server.common", 3, "server: common must be a block of settings"),
        (
            "server.common.extra_args",
            "--x",
            "server.common.extra_args: Input should be a valid tuple, found '--x'",
        ),
        (
            "evaluation.sets",
            [{"name": "a", "path": "x"}, {"name": "a", "path": "y"}],
            "recipe: evaluation.sets has a name twice: ['a', 'a']",
        ),
    ],
)
def test_a_wrong_setting_is_refused_in_words_for_people(
    tmp_path: Path, setting: str, value: Any, message: str
) -> None:
    assert _refusal(tmp_path, _with(setting, value)) == [message]


def _model(folder: Path, **config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "generation.temperature",
            0.7,
            "when sampling, a server that captures hidden states answers garbage",
        ),
        ("extraction.waves", 2, "extraction.waves is 2 and extraction.passes 1: set both to 1"),
        ("extraction.waves", "auto", "extraction.waves is auto and"),
        ("extraction.passes", 3, "extraction.passes 3: set both to 1"),
        ("server.extraction.quantization", "fp8", "with another quantization in server.generation"),
        ("server.generation.dtype", "float16", "with another dtype in server.generation"),
        ("server.generation.extra_args", ["--enable-prefix-caching"], "is forbidden in extraction"),
        ("server.generation.pipeline_parallel", 2, "server.generation.pipeline_parallel is 2, but vLLM"),
    ],
)
def test_what_makes_states_wrong_or_missing_is_refused_only_where_generation_captures_them(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    recipe = _with(key, value)
    recipe["generation"] = {"temperature": 0, **recipe.get("generation", {})}
    _write(tmp_path, recipe)
    load_recipe("tiny", tmp_path)
    recipe["extraction"] = {**recipe["extraction"], "while_generating": True}
    (problem,) = _refusal(tmp_path, recipe)
    assert problem.startswith("recipe: ")
    assert message in problem


def test_a_target_on_this_disk_is_held_against_the_servers_when_the_recipe_is_read(tmp_path: Path) -> None:
    _model(tmp_path / "model", num_attention_heads=6, num_experts=6, max_position_embeddings=2048)
    server = {
        "generation": {"tensor_parallel": 4},
        "extraction": {"expert_parallel": True, "data_parallel": 4},
    }
    assert _refusal(tmp_path, {**_SMALLEST, "server": server}) == [
        "server.generation.tensor_parallel is 4, over which 6 attention heads cannot be split evenly. Valid "
        "values for this target: 1, 2, 3, 6.",
        "server.extraction: 6 experts cannot be spread evenly over 4 ranks (tensor_parallel x "
        "data_parallel). Valid numbers of ranks for this target: 2, 3, 6; or leave expert_parallel out, "
        "which splits each expert.",
    ]
    assert _refusal(tmp_path, _with("server.common.max_model_len", 4096)) == [
        "server.common.max_model_len is 4096, more than the target's context of 2048 tokens: use at most "
        "2048, or leave it out."
    ]
    load_recipe(str(_write(tmp_path, _with("server.common.tensor_parallel", 3))), tmp_path)


@pytest.mark.parametrize(("prompts", "run"), [({"count": 1}, {}), ({"count": 4}, {"shards": 1})])
def test_a_run_all_of_whose_prompts_judge_is_refused(
    tmp_path: Path, prompts: dict[str, int], run: dict[str, int]
) -> None:
    recipe = {**_SMALLEST, "prompts": {**_SMALLEST["prompts"], "per_shard": 1, **prompts}, "run": run}
    assert _refusal(tmp_path, recipe) == [
        "prompts: a run of 1 x prompts.per_shard = 1 judges the draft with all its prompts "
        "(prompts.validation) and trains it with none: raise run.shards, prompts.count or per_shard"
    ]
    two = {**recipe, "prompts": {**recipe["prompts"], "count": 2}, "run": {"shards": 2}}
    assert len(load_recipe(str(_write(tmp_path, two)), tmp_path).shards) == 2


def test_a_config_of_the_target_that_cannot_be_read_is_refused_with_the_recipe(tmp_path: Path) -> None:
    _model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{")
    (line,) = _refusal(tmp_path, _SMALLEST)
    assert line.startswith(f"target.path: {tmp_path / 'model' / 'config.json'} is no JSON")


def test_a_key_misspelt_in_the_common_block_is_said_once(tmp_path: Path) -> None:
    (line,) = _refusal(tmp_path, _with("server.common.tensor_paralel", 2))
    assert line.startswith(
        "server.common.tensor_paralel: unknown key. Did you mean tensor_parallel? Valid keys: "
    )


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    recipe = {**_with("prompts.count", "4"), "training": {"epochs": 0}, "extractoin": {}}
    places = [problem.split(":")[0] for problem in _refusal(tmp_path, recipe)]
    assert places == ["prompts.count", "training.epochs", "extractoin"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\na: 2\n", r"cannot be read: the key 'a' is given twice"),
        (b"prompts: {count: 1, count: 2}\n", r"cannot be read: the key 'count' is given twice"),
        (b"a: [1\n", r"cannot be read: while parsing"),
        (b"\xff\xfe: 1\n", r"cannot be read: 'utf-8' codec"),
        (b"- a\n", r"expected a block of settings, found list"),
        (b"", r"expected a block of settings, found NoneType"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tiny.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=rf"tiny\.yaml.*{message}"):
        load_recipe("tiny", tmp_path)


def test_extends_changes_single_settings_of_the_base(tmp_path: Path) -> None:
    _write(tmp_path, _SMALLEST)
    change = {"name": "big", "prompts": {"count": 8}, "extraction": {"layers": [1, 3]}}
    _write(tmp_path, {"extends": "tiny.yaml", **change}, "big")
    big = load_recipe("big", tmp_path)
    assert (big.name, big.prompts.count, big.prompts.per_shard, big.extraction.layers) == (
        "big",
        8,
        2,
        (1, 3),
    )
    assert big.prompts.sources == load_recipe("tiny", tmp_path).prompts.sources


def test_a_path_is_relative_to_the_file_that_it_stands_in(tmp_path: Path) -> None:
    _write(tmp_path / "base", _SMALLEST)
    _write(tmp_path / "mine", {"extends": "../base/tiny.yaml", "target": {"path": "model"}}, "mine")
    mine = load_recipe("mine", tmp_path / "mine")
    assert mine.target.path == tmp_path / "mine" / "model"
    assert mine.prompts.sources[0].path == tmp_path / "base" / "train.jsonl"
    assert mine.evaluation.sets[0].path == tmp_path / "base" / "evaluation.jsonl"


def test_a_python_counts_from_the_recipe_too_and_keeps_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "python").symlink_to("/usr/bin/env")
    common = {"python": "../env/python", "extra_env": {"path": "bin", "python": "x"}}
    _write(tmp_path / "recipes", {**_SMALLEST, "server": {"common": common}})
    server = load_recipe("tiny", tmp_path / "recipes").server.generation
    assert server.python == tmp_path / "recipes" / "../env/python"
    assert server.extra_env == {"path": "bin", "python": "x"}


def test_extends_in_a_circle_or_into_nothing_is_refused(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "a"), ("c", "d")):
        _write(tmp_path, {"extends": f"{base}.yaml"}, name)
    with pytest.raises(RecipeError, match=r"b\.yaml: extends runs in a circle through .*a\.yaml"):
        load_recipe("a", tmp_path)
    with pytest.raises(RecipeError, match=r"c\.yaml: extends 'd\.yaml', but there is no file .*d\.yaml"):
        load_recipe("c", tmp_path)


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    _write(tmp_path, _SMALLEST)
    _write(tmp_path / "local", _SMALLEST, "mine")
    with pytest.raises(
        RecipeError, match=r"no recipe 'tinny' in .*\. Did you mean tiny\? There are: mine, tiny\."
    ):
        load_recipe("tinny", tmp_path)
    with pytest.raises(RecipeError, match=r"no recipe file .*gone\.yaml"):
        load_recipe(str(tmp_path / "gone.yaml"), tmp_path)


def test_a_local_recipe_takes_precedence(tmp_path: Path) -> None:
    _write(tmp_path, _SMALLEST)
    _write(tmp_path / "local", {**_SMALLEST, "name": "of-my-own"})
    assert load_recipe("tiny", tmp_path).name == "of-my-own"


def test_two_recipes_of_one_slug_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a-b", "a.b", "c"):
        _write(tmp_path, {**_SMALLEST, "name": name}, name)
    monkeypatch.setenv(RECIPES_VARIABLE, "a-b, c,")
    assert [recipe.slug for recipe in load_recipes(tmp_path)] == ["a_b", "c"]
    monkeypatch.setenv(RECIPES_VARIABLE, "a-b,a.b")
    with pytest.raises(RecipeError, match=r"recipes \['a-b', 'a\.b'\] have the same slug a_b"):
        load_recipes(tmp_path)


def test_a_recipe_is_frozen(tmp_path: Path) -> None:
    recipe = load_recipe(str(_write(tmp_path, _SMALLEST)), tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        recipe.prompts.count = 8


def test_what_a_phase_says_wins_over_the_common_block(tmp_path: Path) -> None:
    server = {"common": {"max_num_seqs": 8, "dtype": "float32"}, "extraction": {"dtype": "bfloat16"}}
    settings = load_recipe(str(_write(tmp_path, {**_SMALLEST, "server": server})), tmp_path).server
    assert [(one.dtype, one.max_num_seqs) for one in (settings.generation, settings.extraction)] == [
        ("float32", 8),
        ("bfloat16", 8),
    ]


@pytest.mark.parametrize("path", sorted(TRACKED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_tracked_recipe_is_valid_and_named_as_its_file(path: Path) -> None:
    recipe = load_recipe(path.stem, TRACKED)
    assert recipe.name == path.stem
    assert all(one.path.is_file() for one in recipe.evaluation.sets)
    assert all(source.path is None or source.path.is_file() for source in recipe.prompts.sources)


def test_the_default_recipe_is_smollm2_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECIPES_VARIABLE, raising=False)
    (recipe,) = load_recipes(TRACKED)
    assert recipe.name == "smollm2-cpu"
    assert recipe.partitions.generation == ()
    assert recipe.shards == ("p100-s000", "p100-s001", "p100-s002", "p100-s003")


def test_kimi_is_the_job_that_this_project_grew_out_of() -> None:
    recipe = load_recipe("kimi-k2.5-8gpu", TRACKED)
    gpus = tuple(str(gpu) for gpu in range(8))
    assert (recipe.partitions.generation, recipe.partitions.extraction) == (gpus, gpus)
    assert recipe.partitions.training == ("0",)
    assert all(
        recipe.server.phase(name).expert_parallel for name in ("generation", "extraction", "evaluation")
    )
    assert recipe.server.generation.tensor_parallel == 8
    assert recipe.server.generation.start_timeout_s >= 2 * 22 * 60
    (source,) = recipe.prompts.sources
    assert (source.dataset, recipe.prompts.count) == ("mlabonne/open-perfectblend", 25_000)
    assert len(recipe.shards) == 50
    generation = recipe.generation
    assert (generation.concurrency, generation.max_completion_tokens, generation.request_timeout_s) == (
        200,
        8192,
        1800,
    )
    assert recipe.base_draft is not None
    assert recipe.base_draft.hub_id == "AQ-MedAI/Kimi-K2-Instruct-eagle3"
    assert recipe.extraction.layers == (2, 30, 58, 61)


def _settings(model: type[BaseModel], place: str = "") -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for name, field in model.model_fields.items():
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        blocks = [one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)]
        found += [pair for block in blocks for pair in _settings(block, f"{place}{name}.")]
        found += [] if blocks else [(f"{place}{name}", field.description)]
    return found


def test_every_setting_says_what_it_is() -> None:
    described = dict(_settings(Recipe))
    assert len(described) > 80
    assert [name for name, description in described.items() if not description] == []


@pytest.mark.parametrize("owner", ["ann@example.org", "team:models", None])
def test_an_owner_is_an_address_or_a_team(tmp_path: Path, owner: str | None) -> None:
    _write(tmp_path, {**_SMALLEST, "owner": owner})
    assert load_recipe("tiny", tmp_path).owner == owner


@pytest.mark.parametrize("owner", ["Ann", "team:", "ann@home", "ann@example.org, bob@example.org"])
def test_any_other_owner_is_refused_with_what_is_wanted(tmp_path: Path, owner: str) -> None:
    (problem,) = _refusal(tmp_path, {**_SMALLEST, "owner": owner})
    assert f"owner is '{owner}', expected an e-mail address such as ann@example.org" in problem


def test_each_pass_must_have_the_same_number_of_epochs(tmp_path: Path) -> None:
    (problem,) = _refusal(tmp_path, _with("extraction.passes", 2))
    assert "training.epochs is 3" in problem
    assert "make epochs a multiple of 2" in problem


def test_layers_counted_by_their_output_are_converted_when_the_recipe_is_read(
    tmp_path: Path,
) -> None:
    theirs = _with("extraction.layers", [1, 14, 26, 29])
    theirs["extraction"]["layers_counted"] = "output"
    _write(tmp_path, theirs)
    recipe = load_recipe("tiny", tmp_path)
    assert recipe.extraction.layers == (2, 15, 27, 30)
    again = Extraction.model_validate(recipe.extraction.model_dump())
    assert again == recipe.extraction  # they are not converted a second time
    theirs["extraction"]["layers"] = [-1, 29]
    (problem,) = _refusal(tmp_path, theirs)
    assert "0 is the embedding" in problem
