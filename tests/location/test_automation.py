"""New prompts that flow through by themselves: what asks for them, and what follows from what.

What the daemon would run is run here or only reported as made; the conditions are Dagster's own.
"""

from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest

from eagle3_pipeline.at_work import at_work
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts import revisions
from tests.location.runs import add_run, tick_sensor
from tests.prompts.world import make_lineage
from tests.recipes import distinct_prompts, tiny_recipe, write_prompts

SHARDS = ["tiny-p8-s000", "tiny-p8-s001", "tiny-p8-s002"]
PARTITIONED = {"synthetic_samples", "hidden_state_shards"}
UP_TO_SAMPLES = ("target_model", "prompts", "synthetic_samples")
CHAT = "/v1/chat/completions"


class Flow:
    """The ticks of `tiny_automation`, and what is reported as made between them."""

    def __init__(self, definitions: dg.Definitions, instance: dg.DagsterInstance) -> None:
        self._definitions, self._instance = definitions, instance
        self._cursor = None

    def tick(self) -> dict[str, list[str]]:
        """What is to be made now: the partitions of each asset, or none where it has none."""
        found = dg.evaluate_automation_conditions(
            self._definitions, self._instance, cursor=self._cursor, asset_selection=dg.AssetSelection.all()
        )
        self._cursor = found.cursor
        asked = {
            one.key.path[-1]: sorted(
                part.partition_key
                for part in one.true_subset.expensively_compute_asset_partitions()
                if part.partition_key is not None
            )
            for one in found.results
            if not one.true_subset.is_empty
        }
        return {name: asked[name] for name in sorted(asked)}

    def made(self, *names: str, shards: list[str] = SHARDS) -> None:
        """Report assets as made."""
        for name in names:
            key = dg.AssetKey(["tiny", name])
            for shard in shards if name in PARTITIONED else [None]:
                self._instance.report_runless_asset_event(dg.AssetMaterialization(key, partition=shard))


def _filled(flow: Flow) -> list[dict[str, list[str]]]:
    """Have everything made, beginning with the target; the stages in their order."""
    assert flow.tick() == {}
    flow.made("target_model")
    stages = []
    while asked := flow.tick():
        stages.append(asked)
        flow.made(*asked)
    return stages


@pytest.fixture
def flow(load, instance, tmp_path: Path, tiny_llama: Path) -> Flow:
    return Flow(load(tiny_recipe(tmp_path, tiny_llama, fake=True)), instance)


def test_nothing_is_made_because_the_sensor_is_switched_on(flow: Flow) -> None:
    assert [flow.tick() for _ in range(3)] == [{}] * 3


def test_what_a_person_makes_flows_to_the_release_stage_by_stage_with_the_barrier_held(flow: Flow) -> None:
    assert _filled(flow) == [
        {"prompts": []},
        {"synthetic_samples": SHARDS},
        {"sample_audit": [], "vocabulary_map": []},
        {"hidden_state_shards": SHARDS},
        {"draft_checkpoint": [], "acceptance_report": [], "released_draft": []},  # one run
    ]


def test_new_prompts_ask_for_all_that_follows_once(flow: Flow) -> None:
    _filled(flow)
    assert flow.tick() == {}
    flow.made("prompts")
    assert flow.tick() == {"synthetic_samples": SHARDS}
    assert flow.tick() == {}  # repeated, while nothing is made


def test_one_shard_of_samples_made_again_starts_no_extraction_before_the_audit(flow: Flow) -> None:
    _filled(flow)
    flow.made("synthetic_samples", shards=SHARDS[1:2])
    assert flow.tick() == {"sample_audit": [], "vocabulary_map": []}
    assert flow.tick() == {}
    flow.made("sample_audit")
    assert flow.tick() == {"hidden_state_shards": SHARDS}


def test_some_shards_are_not_enough_for_what_needs_all(flow: Flow) -> None:
    flow.tick()
    flow.made("target_model")
    flow.tick()
    flow.made("prompts")
    assert flow.tick() == {"synthetic_samples": SHARDS}
    flow.made("synthetic_samples", shards=SHARDS[:2])
    assert flow.tick() == {}
    flow.made("synthetic_samples", shards=SHARDS[2:])
    assert flow.tick() == {"sample_audit": [], "vocabulary_map": []}


def test_partitions_that_are_wiped_are_asked_for_again_and_found_complete(
    load, instance, tmp_path: Path, tiny_llama: Path, requests_sent: Callable[[str], int]
) -> None:
    definitions = load(tiny_recipe(tmp_path, tiny_llama, fake=True))
    flow, samples = Flow(definitions, instance), dg.AssetKey(["tiny", "synthetic_samples"])
    job = definitions.resolve_job_def("tiny_pipeline")
    names = [dg.AssetKey(["tiny", name]) for name in UP_TO_SAMPLES]
    flow.tick()
    assert job.execute_in_process(instance=instance, asset_selection=names).success
    flow.tick()
    sent = requests_sent(CHAT)
    instance.wipe_assets([samples])
    assert flow.tick()["synthetic_samples"] == SHARDS
    assert job.execute_in_process(instance=instance, asset_selection=[samples]).success
    assert requests_sent(CHAT) == sent
    assert instance.get_materialized_partitions(samples) == set(SHARDS)


def test_what_follows_the_plan_of_waves_is_left_to_their_sensor(
    load, instance, tmp_path: Path, tiny_llama: Path
) -> None:
    flow = Flow(load(tiny_recipe(tmp_path, tiny_llama, fake=True, extraction={"waves": 2})), instance)
    asked = {name for stage in _filled(flow) for name in stage}
    assert asked == {"prompts", "synthetic_samples", "sample_audit", "vocabulary_map"}


def _make_prompts(lineage: Lineage, **revisions: str) -> None:
    place = lineage.prompts()
    place.folder.mkdir(parents=True)
    place.finish([], {"revisions": revisions})


def test_prompts_are_asked_for_once_for_each_content_of_their_sources(
    load, instance, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_STORAGE", str(tmp_path / "storage"))
    definitions = load(tiny_recipe(tmp_path, tiny_llama, fake=True))

    def tick() -> tuple[list[str | None], str | None]:
        said = tick_sensor(definitions, instance, "tiny_new_prompts")
        return [one.run_key for one in said.run_requests], said.skip_message

    assert "target_model is not made yet" in str(tick()[1])
    lineage = make_lineage(tmp_path, tiny_llama, count=24)
    assert tick() == ([], "no prompts were made yet: make them once, and changes are noticed")
    _make_prompts(lineage)
    assert tick() == ([], "the prompts are those of their sources")

    write_prompts(tmp_path / "train.jsonl", distinct_prompts(50, seed=7))
    with at_work(lineage.folder):
        assert "have changed, but a step works on tiny" in str(tick()[1])
    run = add_run(instance, "tiny_pipeline", dg.DagsterRunStatus.QUEUED, {"eagle3/pipeline": "tiny"})
    assert f"have changed, but run {run[:8]} of tiny_pipeline is QUEUED" in str(tick()[1])
    instance.delete_run(run)
    asked, nothing = tick()
    assert nothing is None
    assert tick() == (asked, None)  # Dagster starts one run for a key
    _make_prompts(lineage)
    assert tick() == ([], "the prompts are those of their sources")

    write_prompts(tmp_path / "train.jsonl", distinct_prompts(50, seed=8))
    assert tick()[0] not in ([], asked)
    (tmp_path / "train.jsonl").unlink()
    assert "BadInput: no file" in str(tick()[1])


def test_a_dataset_that_has_moved_is_told_of_and_starts_nothing(
    load, instance, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_STORAGE", str(tmp_path / "storage"))
    sources = [{"dataset": "some/prompts"}]
    lineage = make_lineage(tmp_path, tiny_llama, count=24, sources=sources)
    definitions = load(tmp_path / "tiny.yaml")
    _make_prompts(lineage, **{"some/prompts@main": "first"})
    commits = iter(["first", "second"])
    monkeypatch.setattr(revisions, "resolve_revision", lambda _: next(commits))
    said = [tick_sensor(definitions, instance, "tiny_new_prompts") for _ in range(2)]
    assert not any(one.run_requests for one in said)
    assert said[0].skip_message == "the prompts are those of their sources"
    assert said[1].skip_message == (
        "some/prompts is at second on main, the prompts are of first: name the commit as the revision of "
        "this source to take it"
    )


def test_the_runs_of_the_automation_are_counted_as_the_recipes(load) -> None:
    sensor = load("smollm2-cpu").resolve_sensor_def("smollm2_cpu_automation")
    assert sensor.run_tags == {"eagle3/pipeline": "smollm2_cpu"}
