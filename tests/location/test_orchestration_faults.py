"""Runs that are killed, cancelled or doubled: nothing is left behind, lost or made twice.

No asset names a pool, so a dead run holds no slot of one.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg
import psutil
import pytest

from eagle3_pipeline.journal import read_journal
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples import read_samples
from eagle3_pipeline.serving.lease import holders
from eagle3_pipeline.serving.process import find_family
from eagle3_pipeline.serving.record import all_records
from eagle3_pipeline.serving.server import stop_servers
from eagle3_pipeline.training.child import run_process
from eagle3_pipeline.training.plan import TrainingPlan
from tests.fakes.faults import write_control
from tests.location.runs import SHARDS, lineage_of, run_assets, tick_schedule
from tests.location.web_ui import terminate_at
from tests.recipes import tiny_recipe
from tests.serving.observe import wait_for

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
SAMPLES = dg.AssetKey(["tiny", "synthetic_samples"])
UP_TO_SAMPLES = ("target_model", "prompts", "synthetic_samples")


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Start a Dagster command line on a recipe, in a process group of its own that ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(recipe: Path, home: str, *arguments: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "dagster", *arguments],
            cwd=ROOT,
            env={**os.environ, "DAGSTER_HOME": home, "EAGLE3_RECIPES": str(recipe)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _sample_ids(lineage: Lineage) -> list[str]:
    return [
        sample.sample_id
        for shard in lineage.recipe.shards
        for sample in read_samples(lineage.synthetic_samples(shard).folder / "samples.parquet")
    ]


def _kept(lineage: Lineage) -> int:
    """Samples that need not be asked for again, of finished shards and of those that are being made."""
    kept = 0
    for place in map(lineage.synthetic_samples, lineage.recipe.shards):
        manifest, journal = place.manifest(), place.folder / "replies.jsonl"
        if manifest is not None:
            kept += manifest.facts["samples"]
        elif journal.exists():
            kept += len(list(read_journal(journal)))
    return kept


def _partitions(instance: dg.DagsterInstance, definitions: dg.Definitions) -> list[str]:
    """What the web UI shows of the samples' shards, in their order."""
    node = definitions.resolve_asset_graph().get(SAMPLES)
    found = instance.get_status_by_partition(SAMPLES, SHARDS, node.partitions_def)
    assert found is not None
    return [status.value if (status := found[shard]) else "none" for shard in SHARDS]


def test_a_run_killed_with_its_machine_is_told_to_dagster_and_the_night_and_the_next_run_go_on(
    load, start, tmp_path, tiny_llama, requests_sent, monkeypatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    definitions = load(recipe)
    home = tmp_path / "dagster_home"
    home.mkdir()
    with monkeypatch.context() as slow, dg.instance_for_test(temp_dir=str(home)) as instance:
        slow.setenv("FAKE_SECONDS_PER_TOKEN", "0.02")
        process = start(recipe, str(home), "job", "execute", "-f", "definitions.py", "-j", "tiny_pipeline")

        def tick() -> object:
            return tick_schedule(definitions, instance, "tiny_nightly")

        wait_for(lambda: requests_sent(CHAT) >= 12 and _kept(lineage_of(recipe)) > 0, 60)
        (run,) = instance.get_runs()
        assert isinstance(tick(), dg.SkipReason)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.STARTED

        assert isinstance(tick(), dg.RunRequest)
        assert instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.FAILURE
        (failure,) = instance.all_logs(run.run_id, dg.DagsterEventType.RUN_FAILURE)
        assert f"Its process (pid {process.pid}) is gone" in failure.message

        assert not holders(())
        (server,) = all_records()
        assert server.state() == "ready"
        lineage = lineage_of(recipe)
        sent, kept = requests_sent(CHAT), _kept(lineage)
        assert 0 < kept < 24
        assert run_assets(definitions, instance, *UP_TO_SAMPLES).success
        assert requests_sent(CHAT) - sent == 24 - kept
        assert [one.process for one in all_records()] == [server.process]


def test_a_cancelled_generation_leaves_its_server_alone_and_what_was_answered_and_is_not_tried_again(
    load, instance, tmp_path, tiny_llama, requests_sent, monkeypatch
) -> None:
    """The first shard was made before: its partition stays what it is."""
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    definitions, lineage = load(recipe), lineage_of(recipe)
    control = tmp_path / "control.json"
    monkeypatch.setenv("FAKE_CONTROL", str(control))
    assert run_assets(definitions, instance, *UP_TO_SAMPLES, shards=(SHARDS[0], SHARDS[0])).success
    write_control(control, seconds_per_token=0.15)
    tree = terminate_at(instance, recipe, "synthetic_samples", lambda: _kept(lineage) > 8)
    write_control(control)
    (server,) = all_records()
    spared = {one.pid for one in [*find_family(server.process, server.marker), server.watcher]}
    assert not [one for one in psutil.wait_procs(tree, timeout=5)[1] if one.pid not in spared]
    assert server.state() == "ready"
    assert not holders(())
    assert _partitions(instance, definitions)[0] == "MATERIALIZED"
    assert "FAILED" not in _partitions(instance, definitions)

    sent, kept = requests_sent(CHAT), _kept(lineage)
    assert 8 < kept < 24
    assert run_assets(definitions, instance, "synthetic_samples").success
    assert requests_sent(CHAT) - sent == 24 - kept
    assert len(set(_sample_ids(lineage))) == len(_sample_ids(lineage)) == 24
    assert _partitions(instance, definitions) == ["MATERIALIZED"] * 3


def test_a_cancelled_training_ends_its_process_and_goes_on_to_the_bits_of_one_that_was_not(
    load, instance, tmp_path, tiny_llama, caplog
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, training={"epochs": 20}, run={"shards": 1})
    definitions, lineage = load(recipe), lineage_of(recipe)
    before = (*UP_TO_SAMPLES, "sample_audit", "hidden_state_shards", "vocabulary_map")
    assert run_assets(definitions, instance, *before, shards=(SHARDS[0], SHARDS[0])).success
    folder = lineage.draft_checkpoint().folder
    tree = terminate_at(instance, recipe, "draft_checkpoint", lambda: any(folder.glob("checkpoints/*")))
    assert not psutil.wait_procs(tree, timeout=5)[1]
    assert not holders(())

    with caplog.at_level("INFO", "eagle3_pipeline.training"):
        assert run_assets(definitions, instance, "draft_checkpoint", shards=(SHARDS[0], SHARDS[0])).success
    assert any("resumed at step" in message for message in caplog.messages)
    assert lineage.draft_checkpoint().require().facts["epochs"] == 20

    straight = tmp_path / "straight"
    straight.mkdir()
    run_process(replace(TrainingPlan.read(folder / "plan.json"), folder=str(straight)))
    drafts = [(one / "draft" / "model.safetensors").read_bytes() for one in (folder, straight)]
    assert drafts[0] == drafts[1]


def test_a_server_that_is_killed_in_the_middle_is_followed_by_another_within_the_run(
    load, instance, tmp_path, tiny_llama, monkeypatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    definitions, lineage = load(recipe), lineage_of(recipe)
    control = tmp_path / "control.json"
    monkeypatch.setenv("FAKE_CONTROL", str(control))
    write_control(control, seconds_per_token=0.02)
    assert run_assets(definitions, instance, "target_model", "prompts").success
    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: _kept(lineage) >= 5, 60)
        (server,) = [record.process for record in all_records() if record.process is not None]
        killed.append(server.pid)
        os.kill(server.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    result = run_assets(definitions, instance, "synthetic_samples")
    killer.join()
    assert result.success
    assert "STEP_UP_FOR_RETRY" not in [event.event_type_value for event in result.all_events]
    assert len(set(_sample_ids(lineage))) == len(_sample_ids(lineage)) == 24
    assert killed[0] not in [record.process.pid for record in all_records() if record.process is not None]


def test_a_shard_that_another_run_makes_is_busy_for_the_second_which_names_it_and_keeps_the_rest(
    load, start, instance, tmp_path, tiny_llama, requests_sent, monkeypatch
) -> None:
    """The last shard was made before; the first run works on the second one while the other wants all."""
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    monkeypatch.setattr("assets.synthetic_samples.RETRIES", dg.RetryPolicy(max_retries=1, delay=0.1))
    definitions, lineage = load(recipe), lineage_of(recipe)
    control = tmp_path / "control.json"
    monkeypatch.setenv("FAKE_CONTROL", str(control))
    assert run_assets(definitions, instance, *UP_TO_SAMPLES, shards=(SHARDS[2], SHARDS[2])).success
    write_control(control, seconds_per_token=0.2)
    selected = ["--select", 'key:"tiny/synthetic_samples"', "--partition", SHARDS[1]]
    home = instance.root_directory
    first = start(recipe, home, "asset", "materialize", "-f", "definitions.py", *selected)
    journal = lineage.synthetic_samples(lineage.recipe.shards[1]).folder / "replies.jsonl"
    wait_for(journal.exists, 60)

    second = run_assets(definitions, instance, "synthetic_samples")
    assert not second.success
    kinds = [event.event_type_value for event in second.all_events]
    assert kinds.count("STEP_UP_FOR_RETRY") == kinds.count("STEP_FAILURE") == 1
    (failure,) = [event for event in second.all_events if event.event_type_value == "STEP_FAILURE"]
    message = failure.step_failure_data.error.to_string()
    pid, *_ = re.findall(r"Busy: \S+ is being written by another process \(pid (\d+) on", message)
    assert int(pid) in [one.pid for one in psutil.Process(first.pid).children(recursive=True)]
    assert _partitions(instance, definitions) == ["FAILED", "FAILED", "MATERIALIZED"]

    write_control(control)
    first.wait(60)
    assert first.returncode == 0
    assert _partitions(instance, definitions) == ["FAILED", "MATERIALIZED", "MATERIALIZED"]
    assert run_assets(definitions, instance, "synthetic_samples").success
    assert len(set(_sample_ids(lineage))) == len(_sample_ids(lineage)) == 24
    assert requests_sent(CHAT) == 24


def test_a_run_that_fails_keeps_the_shards_that_are_made_and_the_next_one_sends_only_what_is_missing(
    load, instance, tmp_path, tiny_llama, requests_sent, monkeypatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    definitions = load(recipe)
    assert run_assets(definitions, instance, *UP_TO_SAMPLES, shards=(SHARDS[0], SHARDS[1])).success
    stop_servers(())
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_CRASH_LOG", "ValueError: No available memory for the cache blocks.")
        assert not run_assets(definitions, instance, "synthetic_samples").success
    assert _partitions(instance, definitions) == ["MATERIALIZED", "MATERIALIZED", "FAILED"]

    sent = requests_sent(CHAT)
    assert sent == 16
    assert run_assets(definitions, instance, "synthetic_samples").success
    assert _partitions(instance, definitions) == ["MATERIALIZED"] * 3
    assert requests_sent(CHAT) - sent == 8


def _write_runs(home: str, count: int) -> None:
    """What runs write all the time: runs, tags, events of a step, materializations."""
    with dg.DagsterInstance.from_config(home) as instance:
        for number in range(count):
            run_id = str(uuid.uuid4())
            instance.add_run(dg.DagsterRun(job_name="tiny_pipeline", run_id=run_id))
            instance.report_dagster_event(dg.DagsterEvent("PIPELINE_START", "tiny_pipeline"), run_id)
            instance.add_run_tags(run_id, {"number": str(number)})
            instance.report_runless_asset_event(dg.AssetMaterialization(SAMPLES, partition=SHARDS[0]))
            instance.report_dagster_event(dg.DagsterEvent("PIPELINE_SUCCESS", "tiny_pipeline"), run_id)


def test_many_processes_write_to_one_dagster_home_at_once_and_none_finds_the_database_locked(
    instance,
) -> None:
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write_runs, args=(instance.root_directory, 10)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    finished = dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS])
    assert instance.get_runs_count(finished) == 40
