import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.extraction import checks, drafts, memory, throughput


class Scripted:
    """Contestants with a speed each; every round is slower than the one before."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @contextmanager
    def opened(self) -> Iterator["Scripted"]:
        self.asked.append("servers")
        yield self

    def warm_up(self) -> None:
        self.asked.append("warm-up")

    def extraction(self) -> dict[str, float]:
        return self._run("extraction", 1900.0, 1.0)

    def prefill(self) -> dict[str, float]:
        return self._run("prefill", 2000.0, 0.4)

    def speculators(self) -> dict[str, float]:
        return self._run("speculators", 1500.0, 4.0)

    def _run(self, who: str, speed: float, cpu_s: float) -> dict[str, float]:
        self.asked.append(who)
        times = self.asked.count(who)
        return {
            "tokens": 1000,
            "seconds": 1000 / speed * times,
            "proof_seconds": 0.02632 if who == "extraction" else 0.0,
            "work_cpu_s": cpu_s,
            "process_cpu_s": 5 + cpu_s,
            "process_seconds": 1000 / speed + cpu_s,
        }


def test_the_contestants_take_turns_in_both_orders_on_servers_that_are_new_for_every_two_rounds() -> None:
    contest = Scripted()
    throughput.hold(contest.opened, rounds=3)
    one = ["extraction", "prefill", "speculators"]
    new = ["servers", "warm-up"]
    assert contest.asked == [*new, *one, *reversed(one), *new, *one]


def test_ratios_are_of_two_runs_of_one_round() -> None:
    found = throughput.hold(Scripted().opened, rounds=3)
    assert found["tokens_per_second"]["prefill"]["most"] == 2000
    assert found["tokens_per_second"]["prefill"]["least"] == pytest.approx(2000 / 3, abs=0.001)
    assert found["tokens_per_second"]["extraction_to_prefill"] == {
        "median": 0.95,
        "least": 0.95,
        "most": 0.95,
    }
    assert found["after_the_proof"]["extraction_to_prefill"]["most"] == pytest.approx(1.0, abs=0.001)
    assert found["cpu_ms_per_1000_tokens"]["extraction_to_speculators"]["median"] == 0.25
    assert found["process_cpu_s"]["speculators"]["median"] == 9
    assert found["command"]["extraction_to_speculators"]["median"] == pytest.approx(4.667 / 1.526, abs=0.002)


def _line(variant: str, seed: int, accepted: float) -> dict[str, Any]:
    return {"variant": variant, "seed": seed, "accepted_per_draft": accepted}


def test_drafts_are_compared_seed_by_seed_and_a_seed_without_its_partner_is_left_out() -> None:
    lines = [_line("once", 0, 0.4), _line("once", 1, 0.5), _line("waves", 1, 0.48), _line("once", 2, 0.3)]
    lines += [_line("fp8", 0, 0.1), _line("waves", 0, 0.42)]
    found = drafts.compare(lines, "waves")
    assert found["seeds"] == [0, 1]
    assert found["ratio_of_accepted"] == {"median": 1.005, "least": 0.96, "most": 1.05}
    assert found["ratio_of_mean_accepted"] == 1.0
    assert found["ratio_of_acceptance_length"]["most"] == pytest.approx(1.42 / 1.4, abs=0.001)
    assert [line["variant"] for line in found["drafts"]] == ["once", "once", "waves", "once", "waves"]


def test_a_killed_measurement_of_drafts_goes_on_with_those_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "work" / "drafts.jsonl"
    wanted = [("once", 0), ("once", 1), ("waves", 0)]
    asked: list[tuple[str, int]] = []

    def measure(variant: str, seed: int) -> dict[str, Any]:
        asked.append((variant, seed))
        if asked == wanted[:2]:
            raise KeyboardInterrupt
        return _line(variant, seed, 0.5)

    with pytest.raises(KeyboardInterrupt):
        drafts.measure_missing(path, wanted, measure)
    with path.open("a") as file:
        file.write('{"variant": "once", "se')  # what a kill leaves of a line
    lines = drafts.measure_missing(path, wanted, measure)
    assert asked == [*wanted[:2], *wanted[1:]]
    assert [(line["variant"], line["seed"]) for line in lines] == wanted
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines


def test_the_checks_share_is_their_time_by_that_of_the_extraction() -> None:
    rounds = []
    for seconds in (1.0, 2.0, 3.0):
        costs = checks.Costs.__new__(checks.Costs)
        costs.samples, costs.tokens, costs.found = 100, 40_000, []
        costs.seconds = {"values": seconds / 4, "layers": seconds / 4, "meaning": seconds / 2}
        rounds.append(costs)
    found = checks.summary(rounds, tokens_per_second=2000.0)
    assert found["ms_per_sample"]["all"] == {"median": 20, "least": 10, "most": 30}
    assert found["share_of_extraction"]["all"]["median"] == 0.1
    assert found["share_of_extraction"]["meaning"]["most"] == 0.075


def test_memory_is_compared_by_the_medians_of_both_sizes() -> None:
    few = [{"samples": 1000, "ours": mib, "reading": 200.0} for mib in (400.0, 410.0, 900.0)]
    many = [{"samples": 4000, "ours": mib, "reading": 202.0} for mib in (410.0, 451.0, 460.0)]
    found = memory.summary(few, many)
    assert found["extraction"] == {"mib": 410.0, "mib_of_many": 451.0, "ratio": 1.1}
    assert found["reader"]["ratio"] == 1.01
