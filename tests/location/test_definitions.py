import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from tests.recipes import tiny_recipe

ROOT = Path(__file__).parents[2]
ASSETS = {
    "acceptance_report",
    "draft_checkpoint",
    "hidden_state_shards",
    "prompts",
    "released_draft",
    "sample_audit",
    "synthetic_samples",
    "target_model",
    "vocabulary_map",
}
PARENTS = {
    "target_model": set(),
    "prompts": {"target_model"},
    "synthetic_samples": {"prompts", "target_model"},
    "sample_audit": {"synthetic_samples"},
    "hidden_state_shards": {"synthetic_samples", "sample_audit"},
    "vocabulary_map": {"synthetic_samples"},
    "draft_checkpoint": {"hidden_state_shards", "vocabulary_map"},
    "acceptance_report": {"draft_checkpoint"},
    "released_draft": {"draft_checkpoint", "acceptance_report"},
}


def _keys(definitions: dg.Definitions) -> set[str]:
    return {key.to_user_string() for key in definitions.resolve_asset_graph().get_all_asset_keys()}


def test_the_asset_keys_are_these(load) -> None:
    assert _keys(load("smollm2-cpu")) == {f"smollm2_cpu/{name}" for name in ASSETS}


def test_each_asset_is_made_from_these(load) -> None:
    graph = load("smollm2-cpu").resolve_asset_graph()
    parents = {
        key.path[-1]: {parent.path[-1] for parent in graph.get(key).parent_keys}
        for key in graph.get_all_asset_keys()
    }
    assert parents == PARENTS


def test_a_base_draft_is_an_asset_only_where_the_recipe_names_one(load) -> None:
    kimi = load("kimi-k2.5-8gpu").resolve_asset_graph()
    base = dg.AssetKey(["kimi_k2_5_8gpu", "base_draft"])
    assert base in kimi.get_all_asset_keys()
    assert base in kimi.get(dg.AssetKey(["kimi_k2_5_8gpu", "draft_checkpoint"])).parent_keys


def test_recipes_lie_side_by_side_under_their_slugs(load) -> None:
    definitions = load("smollm2-cpu", "kimi-k2.5-8gpu", "qwen3-8b-1gpu")
    graph = definitions.resolve_asset_graph()
    assert {key.path[0] for key in graph.get_all_asset_keys()} == {
        "smollm2_cpu",
        "kimi_k2_5_8gpu",
        "qwen3_8b_1gpu",
    }
    assert {graph.get(key).group_name for key in graph.get_all_asset_keys()} == {
        key.path[0] for key in graph.get_all_asset_keys()
    }
    jobs = {job.name for job in definitions.resolve_all_job_defs()} - {"__ASSET_JOB"}
    in_waves = {f"kimi_k2_5_8gpu_{name}" for name in ("samples", "wave", "release")}
    slugs, each = (
        ("smollm2_cpu", "kimi_k2_5_8gpu", "qwen3_8b_1gpu"),
        ("pipeline", "generate_samples", "extract_states"),
    )
    assert jobs - in_waves == {f"{slug}_{name}" for slug in slugs for name in each}
    assert in_waves <= jobs


@pytest.mark.parametrize(
    ("recipe", "first", "count"),
    [("smollm2-cpu", "smollm2_cpu-p100-s000", 4), ("kimi-k2.5-8gpu", "kimi_k2_5_8gpu-p500-s000", 50)],
)
def test_a_partition_key_carries_recipe_and_shard_size(load, recipe: str, first: str, count: int) -> None:
    graph = load(recipe).resolve_asset_graph()
    key = dg.AssetKey([first.split("-")[0], "synthetic_samples"])
    keys = graph.get(key).partitions_def.get_partition_keys()
    assert keys[0] == first
    assert len(keys) == count


def test_every_asset_has_a_description_kinds_and_takes_a_range_in_one_run(load) -> None:
    graph = load("kimi-k2.5-8gpu").resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        node = graph.get(key)
        assert node.description, key
        assert node.kinds, key
        assert node.backfill_policy == dg.BackfillPolicy.single_run(), key


def test_every_asset_leads_to_the_file_and_the_line_of_its_body(load) -> None:
    graph = load("kimi-k2.5-8gpu").resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        (place,) = graph.get(key).metadata["dagster/code_references"].code_references
        path, name = Path(place.file_path), key.path[-1]
        assert path == ROOT / "assets" / f"{name}.py"
        lines = path.read_text().splitlines()[place.line_number - 1 :]
        assert any(f"def {name}(" in line for line in lines[:8]), key


def test_the_columns_of_samples_are_shown_with_what_they_mean(load) -> None:
    graph = load("smollm2-cpu").resolve_asset_graph()
    schema = graph.get(dg.AssetKey(["smollm2_cpu", "synthetic_samples"])).metadata["dagster/column_schema"]
    columns = {one.name: one for one in schema.columns}
    assert len(columns) == 12
    assert columns["completion_token_ids"].type == "list<int32>"
    assert "closing end-of-turn id" in columns["completion_token_ids"].description
    assert not any(one.constraints.nullable for one in schema.columns)


def test_an_owner_of_the_recipe_owns_its_assets_and_without_one_nobody_does(
    load, tmp_path: Path, tiny_llama: Path
) -> None:
    owned = tiny_recipe(tmp_path, tiny_llama, fake=True, owner="team:models")
    graph = load(owned, "smollm2-cpu").resolve_asset_graph()
    owners = {(key.path[0], *graph.get(key).owners) for key in graph.get_all_asset_keys()}
    assert owners == {("tiny", "team:models"), ("smollm2_cpu",)}


def test_the_job_carries_the_range_of_all_shards(load) -> None:
    job = load("smollm2-cpu").resolve_job_def("smollm2_cpu_pipeline")
    assert job.tags["dagster/asset_partition_range_start"] == "smollm2_cpu-p100-s000"
    assert job.tags["dagster/asset_partition_range_end"] == "smollm2_cpu-p100-s003"


def test_the_nightly_schedule_is_stopped_until_switched_on(load) -> None:
    (schedule,) = (load("smollm2-cpu").resolve_schedule_def("smollm2_cpu_nightly"),)
    assert schedule.default_status == dg.DefaultScheduleStatus.STOPPED


def test_definitions_load_in_under_1500_ms_and_without_anything_heavy() -> None:
    """CPU time, not wall time: what else runs on the machine is no matter of the code."""
    code = (
        "import sys, time, definitions; "
        "heavy = {'torch', 'vllm', 'transformers', 'datasets', 'pyarrow', 'numpy', 'matplotlib'}; "
        "print(time.process_time(), *sorted(heavy & set(sys.modules)))"
    )
    seconds = []
    for _ in range(3):
        argv = [sys.executable, "-c", code]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        spent, *heavy = done.stdout.split()
        seconds.append(float(spent))
        assert not heavy
    assert min(seconds) < 1.5, seconds


def test_an_unknown_recipe_is_refused_by_name(load) -> None:
    with pytest.raises(ValueError, match=r"no recipe 'smollm-cpu'.*Did you mean smollm2-cpu"):
        load("smollm-cpu")
