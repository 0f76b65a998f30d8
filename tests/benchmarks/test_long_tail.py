from pathlib import Path

from benchmarks.generation.kills import survive
from benchmarks.generation.load import Load
from benchmarks.generation.long_tail import make_world, measure_ours

SMALL = Load(prompts=200, shards=10, in_flight=20, longest=1024, ms_per_token=0.5)


def test_a_server_killed_five_times_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    lineage, _ = make_world(tmp_path / "kills", SMALL)
    found = survive(lineage, tmp_path, SMALL, kills=5)
    assert found["samples"] == 200
    assert 1 <= found["kills"] <= 5  # on a machine that halts for long, one may come too late
    assert found["requests"] > 200  # what was in flight at a kill is asked again


def test_a_process_of_its_own_asks_for_each_prompt_once(tmp_path: Path) -> None:
    found = measure_ours(tmp_path / "ours", SMALL)
    assert found["replies"] == 200
    assert 0 < found["slots_busy"] <= 1
