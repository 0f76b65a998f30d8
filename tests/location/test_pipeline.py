"""The whole graph in Dagster on the stand-in of the server: everything but vLLM is the real thing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.samples.shard_file import read_samples
from tests.recipes import distinct_prompts, tiny_recipe, write_prompts

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


def _run(definitions: dg.Definitions, job: str, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    return definitions.resolve_job_def(job).execute_in_process(instance=instance)


def _materialize(
    definitions: dg.Definitions, instance: dg.DagsterInstance, *names: str
) -> dg.ExecuteInProcessResult:
    """Make the named assets of the recipe `tiny`, over all shards."""
    graph = definitions.resolve_asset_graph()
    nodes = [graph.get(dg.AssetKey(["tiny", name])) for name in names]
    keys = nodes[-1].partitions_def.get_partition_keys()
    tags = {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]}
    resources = dict(definitions.resources or {})
    return dg.materialize(
        [node.assets_def for node in nodes], instance=instance, tags=tags, resources=resources
    )


def _lineage(recipe: Path) -> Lineage:
    return Lineage(load_recipe(str(recipe), recipe.parent), Path(os.environ["EAGLE3_STORAGE"]))


def _partitions(instance: dg.DagsterInstance, slug: str, name: str) -> set[str]:
    return instance.get_materialized_partitions(dg.AssetKey([slug, name]))


def test_one_job_makes_the_whole_graph(load, instance, tmp_path, tiny_llama, requests_sent) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    result = _run(load(recipe), "tiny_pipeline", instance)
    assert result.success
    expected = {f"tiny-p8-s{number:03d}" for number in range(3)}
    assert _partitions(instance, "tiny", "synthetic_samples") == expected
    assert _partitions(instance, "tiny", "hidden_state_shards") == expected
    assert requests_sent(CHAT) >= 24
    released = _lineage(recipe).released()
    assert released is not None
    assert (Path(released.facts["path"]) / "model.safetensors").is_file()
    sent = requests_sent(CHAT)
    assert _run(load(recipe), "tiny_pipeline", instance).success
    assert requests_sent(CHAT) == sent  # everything was found done


def test_raising_the_count_from_1000_to_2500_sends_exactly_1500(
    load, instance, tmp_path, tiny_llama, requests_sent
) -> None:
    tmp_path.joinpath("many").mkdir()
    write_prompts(tmp_path / "many" / "many.jsonl", distinct_prompts(2600, seed=3))

    def sent_for(count: int) -> int:
        before = requests_sent(CHAT)
        sources = [{"path": "many.jsonl", "column": "prompt"}]
        recipe = tiny_recipe(
            tmp_path / "many",
            tiny_llama,
            fake=True,
            prompts={"count": count, "per_shard": 500, "sources": sources},
            generation={"in_flight": 64},
        )
        assert _materialize(load(recipe), instance, "target_model", "prompts", "synthetic_samples").success
        return requests_sent(CHAT) - before

    assert sent_for(1000) == 1000
    assert sent_for(2500) == 1500
    assert len(_partitions(instance, "tiny", "synthetic_samples")) == 5


def test_two_recipes_in_one_instance_share_no_event(load, instance, tmp_path, tiny_llama) -> None:
    recipes = [tiny_recipe(tmp_path / name, tiny_llama, fake=True, name=name) for name in ("tiny", "other")]
    definitions = load(*recipes)
    assert _run(definitions, "tiny_pipeline", instance).success
    for name in ("synthetic_samples", "hidden_state_shards"):
        assert _partitions(instance, "other", name) == set()
    graph = definitions.resolve_asset_graph()
    events = {key: instance.get_latest_materialization_event(key) for key in graph.get_all_asset_keys()}
    assert {key.path[0] for key, event in events.items() if event} == {"tiny"}


def test_a_pilot_takes_two_shards_to_a_draft_and_its_samples_are_kept(
    load, instance, tmp_path, tiny_llama, requests_sent
) -> None:
    pilot = tiny_recipe(tmp_path, tiny_llama, fake=True, run={"shards": 2})
    assert _run(load(pilot), "tiny_pipeline", instance).success
    assert _partitions(instance, "tiny", "synthetic_samples") == {"tiny-p8-s000", "tiny-p8-s001"}
    lineage = _lineage(pilot)
    assert lineage.released() is not None
    kept = [lineage.synthetic_samples(shard).require().digest for shard in lineage.recipe.shards]

    whole = tiny_recipe(tmp_path, tiny_llama, fake=True)
    assert _run(load(whole), "tiny_pipeline", instance).success
    lineage = _lineage(whole)
    shards = lineage.recipe.shards
    assert len(shards) == 3
    assert [lineage.synthetic_samples(shard).require().digest for shard in shards[:2]] == kept


def test_a_server_that_dies_while_loading_fails_the_step_with_its_log(
    tmp_path, tiny_llama, monkeypatch, eagle3
) -> None:
    monkeypatch.setenv("FAKE_CRASH_LOG", "RuntimeError: no room for the KV cache")
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    done = eagle3("run", "--recipe", str(recipe))
    assert done.returncode == 1
    assert "no room for the KV cache" in done.stdout
    assert "The same command goes on from there." in done.stdout


def test_the_command_makes_a_draft_and_ends_with_the_table(tmp_path, tiny_llama, eagle3) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    done = eagle3("run", "--recipe", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    for row in (
        "samples",
        "truncated",
        "hidden states",
        "acceptance length",
        "by position",
        "tokens per second",
    ):
        assert f"  {row} " in done.stdout
    assert "make ui" in done.stdout


def test_a_run_killed_in_the_middle_goes_on_with_what_is_missing(
    tmp_path, tiny_llama, eagle3, monkeypatch, requests_sent
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True)
    home = tmp_path / "dagster_home"
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "FAKE_SECONDS_PER_TOKEN": "0.02",
    }
    argv = [sys.executable, "-m", "eagle3_pipeline.cli", "run", "--recipe", str(recipe)]
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while requests_sent(CHAT) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = eagle3("run", "--recipe", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [
        sample
        for shard in _lineage(recipe).recipe.shards
        for sample in read_samples(_lineage(recipe).synthetic_samples(shard).folder / "samples.parquet")
    ]
    assert len({sample.sample_id for sample in samples}) == len(samples) == 24
    assert requests_sent(CHAT) < 24 + 24
