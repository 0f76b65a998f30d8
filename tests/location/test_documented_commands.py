"""Each command of docs/dagster.md, run as it stands there, in its order, on a tiny recipe: minutes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from tests.location.conftest import ROOT
from tests.location.runs import SHARDS
from tests.location.web_ui import web_ui
from tests.recipes import tiny_recipe

pytestmark = pytest.mark.soak

# What the page writes for the default recipe, and what it is for the tiny one.
_TINY = {"smollm2_cpu-p100-s003": SHARDS[-1], "smollm2_cpu-p100": "tiny-p8", "smollm2_cpu": "tiny"}
ASSETS = {
    *("target_model", "prompts", "synthetic_samples", "sample_audit", "hidden_state_shards"),
    *("vocabulary_map", "draft_checkpoint", "acceptance_report", "released_draft"),
}
PARTITIONED = {"synthetic_samples", "hidden_state_shards"}
EVERYTHING = {(name, shard) for name in ASSETS for shard in (SHARDS if name in PARTITIONED else (None,))}


def _documented() -> list[list[str]]:
    """The arguments of each Dagster command of the page's part about the command line."""
    page = (ROOT / "docs" / "dagster.md").read_text()
    block = re.search(r"^## From the command line\n.*?^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    text = block[1]
    for theirs, ours in _TINY.items():
        text = text.replace(theirs, ours)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True)) and words[0] != "export"]


class _CommandLine:
    """Dagster's commands in a home of this test, which has the project's own dagster.yaml."""

    def __init__(self, home: Path, recipe: Path) -> None:
        home.mkdir()
        shutil.copy(ROOT / "dagster.yaml", home)
        self._environment = {**os.environ, "DAGSTER_HOME": str(home), "EAGLE3_RECIPES": str(recipe)}

    def __call__(self, words: list[str]) -> str:
        """Run it, which must succeed; its output."""
        done = subprocess.run(
            [str(Path(sys.executable).parent / words[0]), *words[1:]],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _made_since(instance: dg.DagsterInstance, known: set[str]) -> set[tuple[str, str | None]]:
    """What the one new run materialised: names of assets, with their shard."""
    (run_id,) = {run.run_id for run in instance.get_runs()} - known
    known.add(run_id)
    logs = instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    events = [one.dagster_event for one in logs]
    return {(event.asset_key.path[-1], event.partition) for event in events}


def test_the_page_has_a_command_for_each_way_to_start_something() -> None:
    starts = [" ".join(words[:3]) for words in _documented()]
    assert starts == [
        "dagster job execute",
        "dagster asset materialize",
        "dagster asset materialize",
        "dagster asset materialize",
        "dagster job backfill",
        "dagster job backfill",
        "dagster-graphql -w workspace.yaml",
        "dagster asset list",
    ]


def test_each_documented_command_does_what_the_page_says_of_it(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, evaluation={"repeats": 1})
    home = tmp_path / "dagster_home"
    run = _CommandLine(home, recipe)
    everything, over_a_range, prompts, shard, *backfills, graphql, keys = _documented()
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        known: set[str] = set()
        said = run(everything)
        assert "DagsterEvent" not in said
        assert "RUN_START" not in said  # the short lines
        assert _made_since(instance, known) == EVERYTHING
        run(over_a_range)
        assert _made_since(instance, known) == EVERYTHING
        run(prompts)
        assert _made_since(instance, known) == {("prompts", None)}
        run(shard)
        assert _made_since(instance, known) == {("synthetic_samples", SHARDS[1])}
        listed = run(keys).split()
        assert {one for one in listed if one.startswith("tiny/")} == {f"tiny/{name}" for name in ASSETS}

        for backfill in backfills:
            run(backfill)
        assert "LaunchBackfillSuccess" in run(graphql)
        assert len(instance.get_backfills()) == 3
        with web_ui(instance, recipe) as ui:
            looks = (ui.let_the_daemon_look() for _ in range(10))
            queued = next(runs for runs in looks if len(runs) == 2 * len(SHARDS) + 1)
        shards = [one.tags["dagster/partition"] for one in queued if "dagster/partition" in one.tags]
        assert sorted(shards) == sorted([*SHARDS, *SHARDS])
        (of_range,) = [one for one in queued if "dagster/asset_partition_range_start" in one.tags]
        assert of_range.tags["dagster/asset_partition_range_end"] == SHARDS[-1]
