"""The whole graph in Dagster on the stand-in of the server: everything but vLLM is the real thing."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.samples.shard_file import read_samples
from eagle3_pipeline.serving.record import all_records
from tests.corpus import TEXT
from tests.fakes.faults import write_control
from tests.recipes import tiny_recipe, write_prompts

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
SHARDS = ["tiny-p8-s000", "tiny-p8-s001", "tiny-p8-s002"]


def _run(definitions: dg.Definitions, instance: dg.DagsterInstance, *names: str) -> None:
    """Run the pipeline of the recipe `tiny`, or only the named assets of it, over all shards."""
    chosen = [dg.AssetKey(["tiny", name]) for name in names] or None
    job = definitions.resolve_job_def("tiny_pipeline")
    assert job.execute_in_process(instance=instance, asset_selection=chosen).success


def _lineage(recipe: Path) -> Lineage:
    return Lineage(load_recipe(str(recipe), recipe.parent), Path(os.environ["EAGLE3_STORAGE"]))


def _partitions(instance: dg.DagsterInstance, name: str, slug: str = "tiny") -> list[str]:
    return sorted(instance.get_materialized_partitions(dg.AssetKey([slug, name])))


def _start(recipe: Path, tmp_path: Path, stdout: int) -> "subprocess.Popen[bytes]":
    """`eagle3 run` on a slow server, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "eagle3_pipeline.cli", "run", "--recipe", str(recipe)],
        cwd=ROOT,
        env={**os.environ, "DAGSTER_HOME": str(tmp_path / "dagster_home"), "FAKE_SECONDS_PER_TOKEN": "0.02"},
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_pilot_reaches_a_draft_and_the_full_run_keeps_it_all(
    load, instance, tmp_path, tiny_llama, requests_sent
) -> None:
    """Two of three shards first, then all, then all again; beside a second recipe in the same instance."""
    other = tiny_recipe(tmp_path / "other", tiny_llama, fake=True, name="other")
    pilot = tiny_recipe(tmp_path / "tiny", tiny_llama, fake=True, run={"shards": 2})
    definitions = load(pilot, other)
    _run(definitions, instance)
    assert _partitions(instance, "synthetic_samples") == SHARDS[:2]
    assert _partitions(instance, "hidden_state_shards") == SHARDS[:2]
    lineage = _lineage(pilot)
    lineage.released_draft().verify()
    kept = [lineage.synthetic_samples(shard).require().digest for shard in lineage.recipe.shards]

    sent = requests_sent(CHAT)
    whole = tiny_recipe(tmp_path / "tiny", tiny_llama, fake=True)
    # The set after a warm-up: three times with the draft and without it, once in a larger batch, the release.
    evaluated = (3 + 3) * (3 + 8) + (4 + 8) + (3 + 8)
    assert sent == 16 + evaluated
    _run(load(whole, other), instance)
    assert requests_sent(CHAT) == sent + 8 + evaluated
    assert _partitions(instance, "hidden_state_shards") == SHARDS
    lineage = _lineage(whole)
    shards = lineage.recipe.shards
    assert [lineage.synthetic_samples(shard).require().digest for shard in shards[:2]] == kept

    sent = requests_sent(CHAT)
    _run(load(whole, other), instance)
    assert requests_sent(CHAT) == sent  # all was found done

    graph = definitions.resolve_asset_graph()
    events = {key: instance.get_latest_materialization_event(key) for key in graph.get_all_asset_keys()}
    assert {key.path[0] for key, event in events.items() if event} == {"tiny"}


def test_raising_the_count_from_1000_to_2500_sends_exactly_1500(
    load, instance, tmp_path, tiny_llama, requests_sent
) -> None:
    chance, words = random.Random(3), TEXT.split()
    write_prompts(tmp_path / "many.jsonl", [" ".join(chance.sample(words, 12)) for _ in range(2600)])

    def sent_for(count: int) -> int:
        before = requests_sent(CHAT)
        sources = [{"path": str(tmp_path / "many.jsonl"), "column": "prompt"}]
        recipe = tiny_recipe(
            tmp_path / "recipe",
            tiny_llama,
            fake=True,
            prompts={"count": count, "per_shard": 500, "sources": sources},
            generation={"concurrency": 64},
        )
        _run(load(recipe), instance, "target_model", "prompts", "synthetic_samples")
        return requests_sent(CHAT) - before

    assert sent_for(1000) == 1000
    assert sent_for(2500) == 1500
    assert len(_partitions(instance, "synthetic_samples")) == 5


def test_a_run_killed_in_the_middle_goes_on_with_what_is_missing_and_ends_with_the_table(
    tmp_path, tiny_llama, eagle3, monkeypatch, requests_sent
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    process = _start(recipe, tmp_path, stdout=subprocess.DEVNULL)
    _wait_for(lambda: requests_sent(CHAT) >= 12)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    done = eagle3("run", "--recipe", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    lineage = _lineage(recipe)
    ids = [
        sample.sample_id
        for shard in lineage.recipe.shards
        for sample in read_samples(lineage.synthetic_samples(shard).folder / "samples.parquet")
    ]
    assert len(set(ids)) == len(ids) == 24
    rows = ("samples", "truncated", "hidden states", "acceptance length", "by position", "tokens per second")
    for row in rows:
        assert f"  {row} " in done.stdout
    assert "make ui" in done.stdout
    assert "no server of ours runs" in eagle3("server", "status").stdout


def test_a_server_that_hangs_in_the_middle_is_ended_and_another_one_finishes_the_work(
    tmp_path, tiny_llama, monkeypatch
) -> None:
    control = tmp_path / "control.json"
    monkeypatch.setenv("FAKE_CONTROL", str(control))
    write_control(control, hang_after_requests=6)
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, server={"common": {"stall_timeout_s": 2}})
    process = _start(recipe, tmp_path, stdout=subprocess.PIPE)
    _wait_for(lambda: any(record.failure == "ServerStalled" for record in all_records()))
    write_control(control)
    output = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 0, output
    assert "requests got no token for 2 s, though /metrics answers" in output
    lineage = _lineage(recipe)
    made = lineage.made([lineage.synthetic_samples(shard) for shard in lineage.recipe.shards])
    assert sum(manifest.facts["samples"] for manifest in made) == 24


def test_an_interrupted_run_says_when_its_server_stops_and_leaves_it_to_the_next(
    tmp_path, tiny_llama, eagle3, requests_sent
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    process = _start(recipe, tmp_path, stdout=subprocess.PIPE)
    _wait_for(lambda: requests_sent(CHAT) >= 4)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all processes of the command
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130
    assert "The same command goes on from there." in output
    assert "generation server" in output
    assert "stops by itself at" in output
    assert "stopped" in eagle3("server", "stop").stdout
    assert "no server of ours runs" in eagle3("server", "status").stdout


def test_a_server_that_cannot_load_fails_the_run_at_once_with_its_log_and_the_cause(
    tmp_path, tiny_llama, eagle3, monkeypatch
) -> None:
    monkeypatch.setenv("FAKE_CRASH_LOG", "ValueError: No available memory for the cache blocks.")
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    done = eagle3("run", "--recipe", str(recipe))
    assert done.returncode == 1
    assert "ValueError: No available memory for the cache blocks." in done.stdout
    assert "too little memory for the KV cache" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "The same command goes on from there." in done.stdout


def test_an_unknown_key_of_a_recipe_is_refused_with_the_valid_ones(tmp_path, tiny_llama, eagle3) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, generation={"temprature": 1.0})
    done = eagle3("run", "--recipe", str(recipe))
    assert done.returncode == 2
    assert "generation.temprature: unknown key. Did you mean temperature?" in done.stderr
