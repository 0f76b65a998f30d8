"""Which places change when a setting does: exactly those whose results would."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import BadInput, MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Place
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.prompts.selection import digests_of_shards
from eagle3_pipeline.recipe import load_recipe
from tests.recipes import tiny_recipe, write_prompts

SAMPLES = ("synthetic_samples p8-s000", "synthetic_samples p8-s001")
STATES = ("hidden_state_shards p8-s000", "hidden_state_shards p8-s001")
END = ("draft_checkpoint", "acceptance_report", "released_draft")
_ALL = ("target_model", "prompts", *SAMPLES, "sample_audit", "vocabulary_map", *STATES, *END)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    return folder


def _lineage(tmp_path: Path, model_folder: Path, **changes: Any) -> Lineage:
    prompts = {"count": 16, **changes.pop("prompts", {})}
    recipe = load_recipe(str(tiny_recipe(tmp_path, model_folder, prompts=prompts, **changes)), tmp_path)
    return Lineage(recipe, tmp_path / "storage")


def _make(place: Place, facts: dict[str, Any] | None = None, content: str | None = None) -> Place:
    """Make a thing, unless it is there; its content is its fingerprint where none is given."""
    if place.manifest() is None:
        place.folder.mkdir(parents=True)
        (place.folder / "content").write_text(content or place.fingerprint)
        place.finish([place.folder / "content"], facts or {})
    return place


def _made(lineage: Lineage) -> dict[str, Path]:
    """Make everything, in the order of the lineage; the folder of each thing."""
    places = {"target_model": _make(lineage.target_model(), {"model_fingerprint": "m" * 64})}
    if lineage.recipe.base_draft is not None:
        places["base_draft"] = _make(lineage.base_draft(), {"model_fingerprint": "d" * 64})
    places["prompts"] = _make(lineage.prompts(), _shards(lineage))
    shards = lineage.recipe.shards
    places |= {f"synthetic_samples {shard}": _make(lineage.synthetic_samples(shard)) for shard in shards}
    places["sample_audit"] = _make(lineage.sample_audit())
    vocabulary = lineage.vocabulary_map()
    decide = {name: value for name, value in vocabulary.inputs.items() if name != "speculative_tokens"}
    places["vocabulary_map"] = _make(vocabulary, content=json.dumps(decide))
    places |= {f"hidden_state_shards {shard}": _make(lineage.hidden_state_shards(shard)) for shard in shards}
    for name in END:
        places[name] = _make(getattr(lineage, name)())
    return {name: place.folder for name, place in places.items()}


def _shards(lineage: Lineage) -> dict[str, Any]:
    """Facts of prompts: the first rows of the source, and of another seed or screening others."""
    recipe = lineage.recipe
    rows = (recipe.prompts.sources[0].path or Path()).read_text().splitlines()
    prompts = [
        Prompt.create(
            (row, recipe.prompts.model_dump_json(exclude={"count", "sources", "validation"})),
            system=None,
            source="",
        )
        for row in rows
    ]
    judges = [one.prompt_id for one in prompts[: recipe.prompts.validation_prompts]]
    return {"shards": digests_of_shards(prompts, recipe.prompts), "validation": judges}


def _changed(before: dict[str, Path], after: dict[str, Path]) -> set[str]:
    return {name for name, folder in before.items() if after.get(name) != folder}


_AFTER_SAMPLES = {"sample_audit", "vocabulary_map", *STATES, *END}


CHANGES: list[tuple[dict[str, Any], set[str]]] = [
    ({"prompts": {"seed": 1}}, {"prompts", *SAMPLES, *_AFTER_SAMPLES}),
    ({"prompts": {"max_prompt_tokens": 100}}, {"prompts", *SAMPLES, *_AFTER_SAMPLES}),
    ({"prompts": {"near_duplicate_similarity": 0.9}}, {"prompts", *SAMPLES, *_AFTER_SAMPLES}),
    ({"prompts": {"validation": 3}}, {"prompts", SAMPLES[0], *_AFTER_SAMPLES - {STATES[1]}}),
    ({"generation": {"temperature": 0.1}}, {*SAMPLES, *_AFTER_SAMPLES}),
    ({"generation": {"max_completion_tokens": 99}}, {*SAMPLES, *_AFTER_SAMPLES}),
    *(
        ({"server": {"generation": setting}}, {*SAMPLES, *_AFTER_SAMPLES})
        for setting in (
            {"dtype": "float32"},
            {"quantization": "fp8"},
            {"reasoning_parser": "qwen3"},
            {"max_model_len": 500},
            {"extra_args": ["--seed", "1"]},
            {"extra_env": {"VLLM_ATTENTION_BACKEND": "X"}},
        )
    ),
    *(
        ({"server": {"extraction": setting}}, {*STATES, *END})
        for setting in (
            {"dtype": "float32"},
            {"quantization": "fp8"},
            {"extra_args": ["--seed", "1"]},
            {"extra_env": {"VLLM_ATTENTION_BACKEND": "X"}},
        )
    ),
    ({"server": {"extraction": {"max_model_len": 500}}}, {"vocabulary_map", *STATES, *END}),
    ({"server": {"evaluation": {"enforce_eager": False}}}, {"acceptance_report", "released_draft"}),
    ({"server": {"evaluation": {"extra_env": {"A": "b"}}}}, {"acceptance_report", "released_draft"}),
    *(
        ({"generation": bound}, {"sample_audit"})
        for bound in (
            {"max_truncated_share": 0.4},
            {"max_rejected_share": 0.4},
            {"max_degenerate_share": 0.4},
            {"completion_lengths": {"p50": [1, 99]}},
        )
    ),
    ({"generation": {"train_truncated": False}}, _AFTER_SAMPLES),
    ({"extraction": {"layers": [1, 2, 4]}}, {"sample_audit", *STATES, *END}),
    ({"extraction": {"max_sample_tokens": 50}}, {"sample_audit", "vocabulary_map", *STATES, *END}),
    ({"vocabulary": {"draft_tokens": 128}}, {"vocabulary_map", *END}),
    ({"training": {"learning_rate": 0.5}}, set(END)),
    ({"training": {"seed": 1}}, set(END)),
    (
        {"evaluation": {"speculative_tokens": 2}},
        {"vocabulary_map", "acceptance_report", "released_draft"},
    ),
    ({"release": {"gate": [{"number": "speedup", "at_least": 1.5}]}}, {"released_draft"}),
    ({"release": {"folder": "shared", "publish": {"hub_id": "me/a-draft"}}}, set()),
    ({"generation": {"concurrency": 3, "request_timeout_s": 9}}, set()),
    ({"extraction": {"concurrency": 3, "part_gib": 1.0}}, set()),
    ({"server": {"generation": {"enforce_eager": False, "max_num_seqs": 4}}}, set()),
    ({"server": {"extraction": {"cpu_kv_cache_gib": 2.0, "gpu_memory_utilization": 0.2}}}, set()),
    ({"training": {"checkpoint_every_s": 9}}, set()),
    ({"server": {"common": {"idle_timeout_s": 9, "start_timeout_s": 9, "port": 8123}}}, set()),
    ({"partitions": {"generation": "cpu"}}, set()),
]
"""Settings that change, each with all that is made anew."""


@pytest.mark.parametrize(
    ("changes", "expected"), CHANGES, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_a_changed_setting_leads_to_new_places_exactly_where_results_change(
    tmp_path: Path, model_folder: Path, changes: dict[str, Any], expected: set[str]
) -> None:
    before = _made(_lineage(tmp_path, model_folder))
    assert tuple(before) == _ALL
    after = _made(_lineage(tmp_path, model_folder, **changes))
    assert _changed(before, after) == expected


def test_raising_the_count_redoes_no_sample_and_no_state(tmp_path: Path, model_folder: Path) -> None:
    before = _made(_lineage(tmp_path, model_folder))
    train = (tmp_path / "train.jsonl").read_bytes()
    more = _lineage(tmp_path, model_folder, prompts={"count": 40})
    (tmp_path / "train.jsonl").write_bytes(train)  # tiny_recipe writes more prompts for more
    after = _made(more)
    assert _changed(before, after) == {"prompts", "sample_audit", "vocabulary_map", *END}
    assert len([name for name in after if name.startswith("synthetic_samples")]) == 5


def test_another_evaluation_set_that_drops_no_prompt_redoes_no_sample_and_no_state(
    tmp_path: Path, model_folder: Path
) -> None:
    before = _made(_lineage(tmp_path, model_folder))
    write_prompts(tmp_path / "more.jsonl", ["What else is held out?"])
    sets = [
        {"name": "tiny", "path": "evaluation.jsonl", "column": "prompt"},
        {"name": "more", "path": "more.jsonl", "column": "prompt"},
    ]
    after = _made(_lineage(tmp_path, model_folder, evaluation={"sets": sets}))
    assert _changed(before, after) == {"prompts", "acceptance_report", "released_draft"}


def test_a_shard_of_samples_depends_on_its_own_prompts_only(tmp_path: Path, model_folder: Path) -> None:
    lineage = _lineage(tmp_path, model_folder)
    before = _made(lineage)
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join([*lines[:8], '{"prompt": "new"}\n', *lines[9:]]))
    changed = _changed(before, _made(lineage))
    assert {"prompts", SAMPLES[1], STATES[1]} <= changed
    assert not {SAMPLES[0], STATES[0]} & changed


def test_no_value_of_the_environment_gets_into_a_manifest(tmp_path: Path, model_folder: Path) -> None:
    lineage = _lineage(tmp_path, model_folder, server={"common": {"extra_env": {"MY_PASS": "hf_secret"}}})
    _made(lineage)
    manifests = [path.read_text() for path in (tmp_path / "storage").rglob("manifest.json")]
    assert manifests
    assert not [text for text in manifests if "hf_secret" in text]


def test_another_shard_size_never_takes_old_shards_for_its_own(tmp_path: Path, model_folder: Path) -> None:
    before = set(_made(_lineage(tmp_path, model_folder)).values())
    after = _made(_lineage(tmp_path, model_folder, prompts={"per_shard": 4}))
    assert not before & {folder for name, folder in after.items() if "p4-s" in name}


def test_the_pilot_takes_the_first_shards_of_the_whole_plan(tmp_path: Path, model_folder: Path) -> None:
    pilot = _made(_lineage(tmp_path, model_folder, run={"shards": 1}))
    whole = _made(_lineage(tmp_path, model_folder))
    assert _changed(pilot, whole) == {"sample_audit", "vocabulary_map", *END}


def test_a_source_may_be_moved_but_not_edited(tmp_path: Path, model_folder: Path) -> None:
    before = _made(_lineage(tmp_path, model_folder))
    moved = _lineage(
        tmp_path, model_folder, prompts={"sources": [{"path": "moved.jsonl", "column": "prompt"}]}
    )
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    assert _changed(before, _made(moved)) == set()
    write_prompts(tmp_path / "moved.jsonl", ["something else"])
    assert "prompts" in _changed(before, _made(moved))


@pytest.mark.parametrize("name", ["train.jsonl", "evaluation.jsonl"])
def test_a_missing_source_is_named(tmp_path: Path, model_folder: Path, name: str) -> None:
    lineage = _lineage(tmp_path, model_folder)
    _make(lineage.target_model(), {"model_fingerprint": "m"})
    (tmp_path / name).unlink()
    with pytest.raises(
        BadInput, match=rf"no file .*{name}, which the recipe names\. Paths are relative to the recipe's"
    ):
        lineage.prompts()


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.model", "model.safetensors"])
def test_any_file_of_a_target_edited_in_place_makes_another_target(
    tmp_path: Path, model_folder: Path, name: str
) -> None:
    lineage = _lineage(tmp_path, model_folder)
    before = lineage.target_model().folder
    (model_folder / name).write_bytes(b"new")
    assert lineage.target_model().folder != before


def test_a_target_changed_in_place_is_another_target(tmp_path: Path, model_folder: Path) -> None:
    lineage = _lineage(tmp_path, model_folder)
    before = lineage.target_model().folder
    (model_folder / "config.json").write_text(json.dumps({"num_hidden_layers": 4, "rope_theta": 1}))
    assert lineage.target_model().folder != before


def test_what_is_missing_is_named_before_anything_depends_on_it(tmp_path: Path, model_folder: Path) -> None:
    lineage = _lineage(tmp_path, model_folder)
    with pytest.raises(MissingInput, match="target_model is not made yet"):
        lineage.prompts()
    assert lineage.released() is None
    _make(lineage.target_model(), {"model_fingerprint": "m"})
    with pytest.raises(MissingInput, match="prompts is not made yet"):
        lineage.synthetic_samples("p8-s000")
    _make(lineage.prompts(), _shards(lineage))
    with pytest.raises(MissingInput, match="synthetic_samples p8-s000 is not made yet"):
        lineage.sample_audit()


def test_a_base_draft_reaches_the_vocabulary_and_the_training_only(
    tmp_path: Path, model_folder: Path
) -> None:
    before = _made(_lineage(tmp_path, model_folder))
    after = _made(_lineage(tmp_path, model_folder, base_draft={"hub_id": "someone/a-draft"}))
    assert _changed(before, after) == {"vocabulary_map", *END}


def test_an_equal_base_draft_elsewhere_redoes_nothing_but_itself(tmp_path: Path, model_folder: Path) -> None:
    before = _made(_lineage(tmp_path, model_folder, base_draft={"hub_id": "someone/a-draft"}))
    after = _made(_lineage(tmp_path, model_folder, base_draft={"path": "the-same-draft"}))
    assert _changed(before, after) == {"base_draft"}
