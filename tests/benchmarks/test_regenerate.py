import pytest

from benchmarks.generation.regenerate import Numbers, hold


class Scripted:
    """Each client has a cost of a run and one of a sample; each round is slower than the one before."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def ours(self, texts: list[str]) -> Numbers:
        return self._run("ours", len(texts), run_s=1.0, sample_s=0.002, speed=90.0)

    def theirs(self, texts: list[str]) -> Numbers:
        return self._run("theirs", len(texts), run_s=7.0, sample_s=0.001, speed=100.0)

    def _run(self, who: str, samples: int, run_s: float, sample_s: float, speed: float) -> Numbers:
        self.asked.append((who, samples))
        times = sum(one == (who, samples) for one in self.asked)
        return {"samples": samples, "tokens_per_second": speed / times, "cpu_s": run_s + sample_s * samples}


def test_both_are_warmed_up_and_take_turns_with_a_run_of_one_prompt_before_each() -> None:
    contest = Scripted()
    hold(contest, ["Why?"] * 80, rounds=2)
    ours, theirs = [("ours", 1), ("ours", 80)], [("theirs", 1), ("theirs", 80)]
    assert contest.asked == [("ours", 64), ("theirs", 64), *ours, *theirs, *theirs, *ours]


def test_rates_are_compared_within_a_round_and_a_further_sample_bears_no_start() -> None:
    found = hold(Scripted(), ["Why?"] * 101, rounds=3)
    assert found["tokens_per_second"]["ours"] == {"median": 45.0, "least": 30.0, "most": 90.0}
    assert found["tokens_per_second"]["ratio"] == {"median": 0.9, "least": 0.9, "most": 0.9}
    assert found["cpu_ms_per_sample"]["ours"]["median"] == pytest.approx(1000 / 101 + 2, abs=0.001)
    assert found["cpu_ms_per_further_sample"]["ours"]["median"] == pytest.approx(2)
    assert found["cpu_ms_per_further_sample"]["theirs"]["most"] == pytest.approx(1)
