"""`generation.concurrency: auto` beside fixed numbers of requests in flight: tokens per second of whole jobs.

    python -m benchmarks.generation.concurrency                      8 minutes: a stand-in with a knee at 48
    python -m benchmarks.generation.concurrency --real --rounds 3    15 minutes a round: SmolLM2 on vLLM, on
                                                                     a quiet machine

Every job is the step `collect_samples` on the same prompts, greedily, so that all jobs get about the same
replies; it lasts from the opened server to the last manifest. Each has two rates: of the whole job, and
without the tail, that is until no prompt is left to be sent. A setting's rates are the medians of its rounds.

The jobs on the stand-in spend time and no computation, so they run side by side, each with a server of its
own. Those on vLLM run one after the other on one server without prefix caching, every other round in reverse
order, so that a drift of the machine favours no setting.
"""

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.generation.load import Running, recipe_of, write_lineage
from benchmarks.generation.regenerate import PROMPTS, real_server
from benchmarks.record import record, warn_of_changes
from eagle3_pipeline.generation.collection import collect_samples
from eagle3_pipeline.generation.vitals import Vitals
from eagle3_pipeline.serving.metrics import scrape
from tests.fakes.process import SERVED_NAME, stand_in
from tests.models import make_llama
from tests.recipes import distinct_prompts

KNEE = 48
_FAKE: dict[str, Any] = {"knee": KNEE, "seconds_per_token": 1 / 30, "mean_tokens": 150, "long_tail": True}
_LIMITS = (24, 32, 48, 64, 96, 128)
_REAL_LIMITS = (32, 48, 64, 96)
_RATES = ("tokens_per_second", "without_tail")

Setting = int | str


@dataclass(frozen=True)
class Sent:
    """Tokens that the server had made at a moment at which prompts were left to be sent."""

    at: float
    tokens: int


def run_job(
    folder: Path, texts: Sequence[str], setting: Setting, longest: int, server: Any
) -> dict[str, Any]:
    """The numbers of one job on a running server; `setting` is the recipe's generation.concurrency."""
    generation = {"concurrency": setting, "max_completion_tokens": longest, "temperature": 0.0}
    lineage, _ = write_lineage(folder, recipe_of(texts, len(texts), generation), texts)
    news: list[Sent] = []

    def on_pulse(vitals: Vitals) -> None:
        if vitals.done + vitals.in_flight < vitals.total:
            news.append(Sent(time.monotonic(), scrape(server.base_url).generation_tokens))

    began = Sent(time.monotonic(), scrape(server.base_url).generation_tokens)
    (made,) = collect_samples(
        lineage,
        lineage.recipe.shards,
        lambda: contextlib.nullcontext(server),
        lambda shard, manifest: None,
        on_pulse,
    )
    seconds = time.monotonic() - began.at
    last = news[-1]
    numbers = {
        "setting": setting,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(made.facts["completion_tokens"] / seconds, 1),
        "without_tail": round((last.tokens - began.tokens) / (last.at - began.at), 1),
    }
    if setting == "auto":
        history = made.facts["server_history"]
        numbers["limits"] = {int(at): round(limit) for at, limit in _changes(history)}
    print(json.dumps(numbers), flush=True)
    return numbers


def _changes(history: dict[str, list[float]]) -> Iterator[tuple[float, float]]:
    before = None
    for at, limit in zip(history["seconds"], history["limit"], strict=True):
        if limit != before:
            yield at, limit
        before = limit


def on_stand_in(folder: Path, count: int, rounds: int) -> list[dict[str, Any]]:
    """All settings at the same time, each with a stand-in of its own; one round after the other."""
    os.environ.setdefault("FAKE_PYTHON", sys.executable)
    model = make_llama(folder / "model")
    texts = distinct_prompts(count, seed=1)

    def run(number: int, setting: Setting) -> dict[str, Any]:
        place = folder / f"{number}-{setting}"
        with stand_in(place, model, "--max-num-seqs", "256", **_FAKE) as fake:
            running = Running(str(fake.client.base_url).rstrip("/"), SERVED_NAME)
            return run_job(place / "job", texts, setting, longest=1000, server=running)

    settings: list[Setting] = [*_LIMITS, "auto"]
    with ThreadPoolExecutor(len(settings)) as pool:
        return [job for number in range(rounds) for job in pool.map(run, [number] * len(settings), settings)]


def on_vllm(folder: Path, count: int, rounds: int, target: Path | None) -> list[dict[str, Any]]:
    """One setting after the other on one server, which is started for it and stopped at the end."""
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()[:count]]
    settings: list[Setting] = [*_REAL_LIMITS, "auto"]
    numbers = []
    with real_server(target, folder / "storage") as (server, _):
        run_job(folder / "warm-up", texts[:96], 32, 64, server)
        for number in range(rounds):
            for setting in settings if number % 2 == 0 else reversed(settings):
                numbers.append(run_job(folder / f"{number}-{setting}", texts, setting, 256, server))
    return numbers


def summary(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """All jobs, the medians of each setting, and what `auto` reaches of the best fixed number."""
    medians = {
        setting: {
            rate: round(statistics.median(job[rate] for job in jobs if job["setting"] == setting), 1)
            for rate in _RATES
        }
        for setting in dict.fromkeys(job["setting"] for job in jobs)
    }
    shares = {}
    for rate in _RATES:
        best = max((setting for setting in medians if setting != "auto"), key=lambda one: medians[one][rate])
        ratio = medians["auto"][rate] / medians[best][rate]
        shares[rate] = {"best_fixed": best, "auto_to_best": round(ratio, 3)}
    return {"jobs": jobs, "medians": medians, **shares}


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", help="on vLLM")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompts", type=int, help="fewer for a trial, which is not recorded")
    parser.add_argument("--target", type=Path, help="folder of SmolLM2 for --real, by default the demo's")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    warn_of_changes()
    name, count = ("concurrency-real", 400) if options.real else ("concurrency", 2100)
    with tempfile.TemporaryDirectory(prefix="concurrency-") as folder:
        size = (Path(folder), options.prompts or count, options.rounds)
        numbers = summary(on_vllm(*size, options.target) if options.real else on_stand_in(*size))
    print(json.dumps({key: value for key, value in numbers.items() if key != "jobs"}, indent=2))
    if options.prompts is None:
        print(f"written: {record(name, {'prompts': count, 'rounds': options.rounds, **numbers})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
