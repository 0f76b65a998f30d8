"""The climb on simulated servers, in virtual time."""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.generation.climb import START, Climb
from eagle3_pipeline.generation.concurrency import Reading

MOST = 1024
SEEDS = range(8)


def knee(top: int, *, beyond: float = 0.5) -> Callable[[int], float]:
    """30 tokens/s for each request up to the knee; beyond it, in all, falling by a power."""
    return lambda running: 30 * min(running, top) * min(1.0, top / max(running, 1)) ** beyond


def nearly_flat(running: int) -> float:
    """A small model on a CPU: 460 tokens/s of 32 requests, 500 of 64."""
    return 30 * running / (1 + running / 17.5)


@dataclass
class Server:
    """A server in virtual time. What was sent stays until it is done: a lowered limit takes its time."""

    rate: Callable[[int], float]
    max_num_seqs: int = MOST
    cache: int = 4 * MOST
    """Requests whose KV cache there is room for; with more, requests are preempted and work is lost."""
    noise: float = 0.15
    seed: int = 0
    tokens_of_reply: int = 200
    intake_s: float = 0.0
    """Seconds in which readings of a raise show its prompts being worked on, and a tenth of the tokens."""
    tokens: float = 0.0
    in_use: float = START
    now: float = 0.0
    limits: list[int] = field(default_factory=list)

    def tokens_per_second(self, in_use: int) -> float:
        running = min(in_use, self.max_num_seqs)
        return self.rate(running) * min(1.0, self.cache / max(running, 1))

    def best(self) -> float:
        """Tokens per second of the best fixed limit."""
        return max(self.tokens_per_second(limit) for limit in range(1, MOST))

    def run(self, seconds: float, climb: Climb) -> "Server":
        chance = random.Random(self.seed)
        end = self.now + seconds
        limit, before, asked, taken_in = climb.limit, 0, 0, self.now
        while self.now < end:
            step = 2.0 if climb.rests else 1.0
            drained = self.in_use - self.tokens_per_second(round(self.in_use)) * step / self.tokens_of_reply
            self.in_use = max(limit, drained)
            in_use = round(self.in_use)
            running = min(in_use, self.max_num_seqs)
            rate = self.tokens_per_second(in_use)
            if limit > asked:
                taken_in = self.now + self.intake_s
            asked = limit
            self.now += step
            self.tokens += rate * step
            if self.now <= taken_in:
                running, rate = min(running, before), rate / 10
            else:
                before = limit
            reading = Reading(
                at=self.now,
                limit=limit,
                running=running,
                waiting=in_use - running,
                tokens_per_second=rate * chance.uniform(1 - self.noise, 1 + self.noise),
                kv_cache_usage=min(1.0, running / self.cache),
                preemptions=max(0, running - self.cache),
            )
            limit = climb.look(reading, in_use)
            self.limits.append(limit)
        return self


def share_of_best(**server: object) -> list[float]:
    """Tokens of ten minutes, ramp included, over those of the best fixed limit; by seed."""
    made = [Server(seed=seed, **server).run(600, Climb(MOST)) for seed in SEEDS]  # type: ignore[arg-type]
    return [one.tokens / (one.best() * one.now) for one in made]


@pytest.mark.parametrize("noise", [0.05, 0.15])
@pytest.mark.parametrize(
    "server",
    [
        {"rate": knee(24)},
        {"rate": knee(96)},
        {"rate": knee(400)},
        {"rate": knee(24, beyond=0)},
        {"rate": knee(96, beyond=0)},
        {"rate": nearly_flat, "max_num_seqs": 64},
        {"rate": nearly_flat, "max_num_seqs": 64, "intake_s": 3.0},
        {"rate": nearly_flat, "max_num_seqs": 16},
        {"rate": knee(MOST), "max_num_seqs": 256},
        {"rate": knee(48), "cache": 200},
    ],
)
def test_it_reaches_95_percent_of_the_best_fixed_limit(server: dict[str, object], noise: float) -> None:
    shares = share_of_best(noise=noise, **server)
    assert sum(shares) / len(shares) >= 0.95
    assert min(shares) >= 0.93


def test_a_server_that_preempts_is_brought_below_that_and_kept_there() -> None:
    server = Server(knee(MOST), cache=100).run(600, Climb(MOST))
    assert max(server.limits) <= 128
    settled = server.limits[len(server.limits) // 2 :]
    assert sum(limit >= 100 for limit in settled) / len(settled) < 0.05
    assert min(settled) >= 70


def test_a_queue_is_cut_to_what_keeps_the_server_full() -> None:
    server = Server(nearly_flat, max_num_seqs=64, noise=0.02).run(300, Climb(MOST))
    assert max(server.limits) <= 128
    # The median, as it may be trying a neighbour at the end.
    assert 60 <= statistics.median(server.limits[-100:]) <= 68


def test_it_recovers_upwards_and_downwards_when_the_load_changes() -> None:
    climb = Climb(MOST)
    server = Server(knee(96), noise=0.05).run(900, climb)
    for top, least, most in ((48, 40, 60), (96, 80, 120)):
        server.rate = knee(top)
        server.run(900, climb)
        assert least <= climb.limit <= most


def test_the_ramp_to_hundreds_takes_seconds() -> None:
    server = Server(knee(400), noise=0.05).run(20, Climb(MOST))
    assert max(server.limits) >= 400


def test_readings_of_a_job_that_does_not_fill_its_slots_teach_nothing() -> None:
    climb = Climb(MOST)
    for second in range(100):
        reading = Reading(second, climb.limit, 10, 5, random.Random(second).uniform(0, 900), 0.99, 3)
        assert climb.look(reading, in_use=START - 1) == START


def test_a_slow_server_is_not_judged_by_a_handful_of_tokens() -> None:
    climb = Climb(MOST)
    # 20 tokens/s: ten seconds make a rate.
    for second in range(10):
        assert climb.look(Reading(second, START, START, 0, 20.0, 0.1, 0), START) == START
    for second in range(10, 14):
        climb.look(Reading(second, START, START, 0, 20.0, 0.1, 0), START)
    assert climb.limit == 2 * START


def test_a_queue_that_the_server_is_still_taking_in_is_none() -> None:
    climb = Climb(MOST)
    for second, waiting in enumerate((20, 20, 14, 8, 2)):
        reading = Reading(second, START, START - waiting, waiting, 100.0, 0.1, 0)
        assert climb.look(reading, START) == START


readings = st.builds(
    Reading,
    at=st.just(0.0),
    limit=st.just(0),
    running=st.integers(0, 2000),
    waiting=st.integers(0, 2000),
    tokens_per_second=st.one_of(st.just(0.0), st.floats(0, 1e6)),
    kv_cache_usage=st.floats(0, 1),
    preemptions=st.sampled_from([0, 0, 0, 0, 1, 50]),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2000), st.lists(st.tuples(readings, st.floats(0.1, 100), st.booleans()), max_size=120))
def test_the_limit_is_never_outside_of_its_bounds(most: int, seen: list[tuple[Reading, float, bool]]) -> None:
    climb = Climb(most)
    at = 0.0
    for reading, seconds, is_full in seen:
        at += seconds
        in_use = climb.limit if is_full else climb.limit + 1
        moved = Reading(at, *list(vars(reading).values())[1:])
        assert 1 <= climb.look(moved, in_use) <= most
