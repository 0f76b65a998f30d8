"""The button "Materialize all" on a clean instance, as the web UI sends it; then one shard again."""

import shutil

import dagster as dg

from tests.fakes.faults import write_control
from tests.fakes.log import read_log
from tests.location.runs import SHARDS, lineage_of
from tests.location.web_ui import web_ui
from tests.recipes import tiny_recipe

PARTITIONED = ("synthetic_samples", "hidden_state_shards")
OTHERS = (
    *("target_model", "prompts", "sample_audit", "vocabulary_map"),
    *("draft_checkpoint", "acceptance_report", "released_draft"),
)


def _names(run: dg.DagsterRun) -> set[str]:
    assert run.asset_selection is not None
    return {key.path[-1] for key in run.asset_selection}


def _of_phase(start: dict) -> str:
    """What a server was started for, by its command line."""
    line = " ".join(start["argv"])
    if "extract_hidden_states" in line:
        return "extraction"
    return "with the draft" if "speculative" in line else "the target alone"


def test_materialize_all_is_five_runs_in_order_and_a_server_a_phase_and_one_shard_again_marks_what_follows(
    instance, tmp_path, tiny_llama, requests_sent, monkeypatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, evaluation={"repeats": 1})
    control = tmp_path / "control.json"
    monkeypatch.setenv("FAKE_CONTROL", str(control))
    log = tmp_path / "requests.jsonl"
    with web_ui(instance, recipe) as ui:
        runs = ui.work_off(ui.backfill(*PARTITIONED, *OTHERS))
        assert [_names(run) for run in runs] == [
            {"target_model", "prompts"},
            {"synthetic_samples"},
            {"sample_audit", "vocabulary_map"},
            {"hidden_state_shards"},
            {"draft_checkpoint", "acceptance_report", "released_draft"},
        ]
        for name in PARTITIONED:
            assert sorted(instance.get_materialized_partitions(dg.AssetKey(["tiny", name]))) == SHARDS
        assert [_of_phase(start) for start in read_log(log, "start")] == [
            "the target alone",  # generation
            "extraction",
            "with the draft",
            "the target alone",
            "with the draft",  # as it is released
        ]
        assert ui.out_of_date(PARTITIONED, OTHERS) == set()
        lineage_of(recipe).released_draft().verify()

        shard = lineage_of(recipe).synthetic_samples(lineage_of(recipe).recipe.shards[1])
        before = shard.require().digest
        shutil.rmtree(shard.folder)
        write_control(control, mean_tokens=30)
        (again,) = ui.work_off(ui.backfill("synthetic_samples", shards=[SHARDS[1]]))
        ends = [again.tags[f"dagster/asset_partition_range_{end}"] for end in ("start", "end")]
        assert ends == [SHARDS[1]] * 2
        assert shard.require().digest != before
        assert ui.out_of_date(PARTITIONED, OTHERS) == {
            f"hidden_state_shards {SHARDS[1]}",
            "sample_audit",
            "vocabulary_map",
        }
