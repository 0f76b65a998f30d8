"""How long Dagster takes to load the definitions, which it does in every process of every run."""

import os
import subprocess
import sys
from pathlib import Path

from tests.location.conftest import ROOT
from tests.recipes import tiny_recipe

_LOAD = """
import time, dagster, dagster._cli.asset  # as every command of Dagster has them
began = time.process_time()
from definitions import defs
graph = defs.resolve_asset_graph()
defs.get_repository_def().get_all_jobs()
print(time.process_time() - began)
(key,) = [key for key in graph.get_all_asset_keys() if key.path[-1] == "hidden_state_shards"]
print(len(graph.get(key).partitions_def.get_partition_keys()))
"""


def test_definitions_of_two_thousand_partitions_load_in_less_than_two_seconds_of_cpu(
    tmp_path: Path, tiny_llama: Path
) -> None:
    """CPU, not wall time: what else runs on the machine is no matter of the code."""
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, prompts={"count": 2000, "per_shard": 1})
    loaded = subprocess.run(
        [sys.executable, "-c", _LOAD],
        cwd=ROOT,
        env={**os.environ, "EAGLE3_RECIPES": str(recipe)},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, partitions = loaded.stdout.split()
    assert int(partitions) == 2000
    assert float(seconds) < 2
