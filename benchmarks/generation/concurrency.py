"""`generation.concurrency: auto` beside fixed numbers of requests in flight: tokens per second of whole jobs.

    python -m benchmarks.generation.concurrency           8 minutes: a stand-in with a knee at 48
    python -m benchmarks.generation.concurrency --real    half an hour: SmolLM2 on vLLM, on a quiet machine

Every job is the step `collect_samples` on the same prompts, from the opened server to the last manifest. Two
rates of each: of the whole job, and without the tail, that is until no prompt is left to be sent. The jobs on
the stand-in spend time and no computation, so they run side by side, each with a server of its own. Those on
vLLM run one after the other on one server; a number in front of each prompt keeps its prefix cache out of it.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.generation.load import Running, recipe_of, write_lineage
from benchmarks.generation.target import RECIPE
from benchmarks.record import record
from eagle3_pipeline.generation.collection import collect_samples
from eagle3_pipeline.generation.vitals import Vitals
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.serving.metrics import scrape
from eagle3_pipeline.serving.server import open_server
from eagle3_pipeline.serving.specification import generation_server
from eagle3_pipeline.target import make_target
from tests.fakes.process import SERVED_NAME, stand_in
from tests.models import make_llama
from tests.recipes import distinct_prompts

KNEE = 48
_FAKE: dict[str, Any] = {"knee": KNEE, "seconds_per_token": 1 / 30, "mean_tokens": 150, "long_tail": True}
_LIMITS = (24, 32, 48, 64, 96, 128)
_REAL_LIMITS = (32, 48, 64, 96)

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
    generation = {"concurrency": setting, "max_completion_tokens": longest}
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


def on_stand_in(folder: Path, count: int) -> list[dict[str, Any]]:
    """All settings at the same time, each with a stand-in of its own."""
    os.environ.setdefault("FAKE_PYTHON", sys.executable)
    model = make_llama(folder / "model")
    texts = distinct_prompts(count, seed=1)

    def run(setting: Setting) -> dict[str, Any]:
        place = folder / str(setting)
        with stand_in(place, model, "--max-num-seqs", "256", **_FAKE) as fake:
            running = Running(str(fake.client.base_url).rstrip("/"), SERVED_NAME)
            return run_job(place / "job", texts, setting, longest=1000, server=running)

    settings: list[Setting] = [*_LIMITS, "auto"]
    with ThreadPoolExecutor(len(settings)) as pool:
        return list(pool.map(run, settings))


def on_vllm(folder: Path, count: int) -> list[dict[str, Any]]:
    """One setting after the other on the demo's server, which is started for it and stopped at the end."""
    lineage = Lineage(load_recipe(str(RECIPE), RECIPE.parent), folder / "storage")
    make_target(lineage)
    source = RECIPE.parent / str(lineage.recipe.prompts.sources[0].path)
    rows = [json.loads(line) for line in source.read_text().splitlines()[:count]]
    settings: list[Setting] = [*_REAL_LIMITS, "auto"]
    numbers = []
    with open_server(generation_server(lineage), folder / "logs", stop=True) as server:
        run_job(folder / "warm-up", [f"(0) {row['prompt']}" for row in rows[:96]], 32, 64, server)
        for number, setting in enumerate(settings, start=1):
            texts = [f"({number}) {row['prompt']}" for row in rows]
            numbers.append(run_job(folder / str(setting), texts, setting, 256, server))
    return numbers


def summary(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """All jobs, and what `auto` reaches of the best fixed number."""
    *fixed, auto = jobs
    shares = {}
    for rate in ("tokens_per_second", "without_tail"):
        best = max(fixed, key=lambda job: float(job[rate]))
        shares[rate] = {"best_fixed": best["setting"], "auto_to_best": round(auto[rate] / best[rate], 3)}
    return {"jobs": jobs, **shares}


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", help="on vLLM")
    parser.add_argument("--prompts", type=int, help="fewer for a trial, which is not recorded")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    measure: Callable[[Path, int], list[dict[str, Any]]] = on_vllm if options.real else on_stand_in
    name, count = ("concurrency-real", 400) if options.real else ("concurrency", 2100)
    with tempfile.TemporaryDirectory(prefix="concurrency-") as folder:
        numbers = summary(measure(Path(folder), options.prompts or count))
    print(json.dumps({key: value for key, value in numbers.items() if key != "jobs"}, indent=2))
    if options.prompts is None:
        print(f"written: {record(name, {'prompts': count, **numbers})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
