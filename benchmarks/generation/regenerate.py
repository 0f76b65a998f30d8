"""This step beside speculators' client on the real vLLM: tokens a second, and CPU of the client.

    python -m benchmarks.generation.regenerate      10 to 13 minutes on two cores; writes the result
    python -m benchmarks.generation.regenerate --base-url URL --model NAME --prompts 30      a trial, printed

Both ask the generation server of recipes/smollm2-cpu.yaml for the first 120 prompts of recipes/everyday, 64
in flight, and get token ids back. Both are greedy with the same limit, so that their replies, and the tail of
the longest ones, are about the same. The server runs without prefix caching, which would favour whoever comes
second. After a warm-up of both they take turns, and who begins changes from round to round. Measured are

    tokens_per_second           from the opened server to the last file, without the imports
    cpu_ms_per_sample           of the whole process with its imports: what a user pays for this many samples
    cpu_ms_per_further_sample   what each sample after the first adds: the slope from a run of one prompt to
                                the whole run of the same round. Seconds of imports are in both and cancel,
                                but for their noise: numbers that differ by less than their spread do not.

Each is the median of the rounds with the least and the most of them; `ratio` is ours to theirs, of the two
runs of one round. The slopes have none, since theirs is close to 0.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.generation.load import Running, recipe_of, write_dataset, write_lineage
from benchmarks.generation.process import run
from benchmarks.generation.target import RECIPE, target_folder
from benchmarks.generation.theirs import regenerate
from benchmarks.record import record, warn_of_changes
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.serving.server import open_server
from eagle3_pipeline.serving.specification import generation_server
from eagle3_pipeline.target import make_target

PROMPTS = RECIPE.parent / "everyday" / "train.jsonl"
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
Numbers = dict[str, float]


class Contest:
    """Both clients against one server; each run has a folder of its own below `folder`."""

    def __init__(
        self, folder: Path, running: Running, tokenizer: Path, in_flight: int, max_tokens: int
    ) -> None:
        self._folder = folder
        self._running = running
        self._tokenizer = tokenizer
        self._in_flight = in_flight
        self._max_tokens = max_tokens
        self._runs = 0

    def ours(self, texts: list[str]) -> Numbers:
        """One run of collect_samples, in three shards where they divide evenly."""
        folder = self._next_folder("ours")
        shards = 3 if len(texts) % 3 == 0 else 1
        generation = {"concurrency": self._in_flight, "max_completion_tokens": self._max_tokens, **SAMPLING}
        lineage, recipe = write_lineage(folder, recipe_of(texts, len(texts) // shards, generation), texts)
        command = [sys.executable, "-m", "benchmarks.generation.ours", str(recipe), str(lineage.storage_root)]
        command += ["--base-url", self._running.base_url, "--model", self._running.model]
        usage = run(command, folder)
        return self._numbers(json.loads(usage.output), usage.cpu_s, usage.peak_bytes)

    def theirs(self, texts: list[str]) -> Numbers:
        """One run of speculators' client."""
        folder = self._next_folder("theirs")
        folder.mkdir()
        usage, found = regenerate(
            folder / "run",
            write_dataset(folder / "prompts.jsonl", texts),
            self._running.base_url,
            self._running.model,
            self._tokenizer,
            in_flight=self._in_flight,
            max_tokens=self._max_tokens,
            sampling=SAMPLING,
        )
        return self._numbers(found, usage.cpu_s, usage.peak_bytes)

    def _next_folder(self, who: str) -> Path:
        self._runs += 1
        return self._folder / f"{self._runs}-{who}"

    @staticmethod
    def _numbers(found: Numbers, cpu_s: float, peak_bytes: int) -> Numbers:
        return {
            "samples": found["samples"],
            "completion_tokens": found["completion_tokens"],
            "seconds": round(found["seconds"], 2),
            "tokens_per_second": round(found["completion_tokens"] / found["seconds"], 1),
            "cpu_s": round(cpu_s, 3),
            "peak_mib": round(peak_bytes / 2**20, 1),
        }


def hold(contest: Contest, texts: list[str], rounds: int) -> dict[str, Any]:
    """A warm-up of both clients, then the rounds; returns what main records, with all runs."""
    clients = {"ours": contest.ours, "theirs": contest.theirs}
    for ask in clients.values():
        ask(texts[:64])
    single: dict[str, list[Numbers]] = {"ours": [], "theirs": []}
    runs: dict[str, list[Numbers]] = {"ours": [], "theirs": []}
    for number in range(rounds):
        for who in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
            for kind, asked, into in (("one prompt", texts[:1], single), ("all prompts", texts, runs)):
                into[who].append(clients[who](asked))
                print(f"round {number + 1}, {who}, {kind}: {json.dumps(into[who][-1])}", flush=True)
    further = {who: spread(map(_further_ms, single[who], runs[who])) for who in clients}
    return {
        "tokens_per_second": _compare(runs, lambda one: one["tokens_per_second"]),
        "cpu_ms_per_sample": _compare(runs, lambda one: 1000 * one["cpu_s"] / one["samples"]),
        "cpu_ms_per_further_sample": further,
        "one_prompt": single,
        "runs": runs,
    }


def spread(values: Iterable[float]) -> Numbers:
    """Median, least and most."""
    kept = sorted(values)
    return {
        "median": round(statistics.median(kept), 3),
        "least": round(kept[0], 3),
        "most": round(kept[-1], 3),
    }


def _compare(runs: dict[str, list[Numbers]], value: Callable[[Numbers], float]) -> dict[str, Numbers]:
    ours, theirs = (list(map(value, runs[who])) for who in ("ours", "theirs"))
    ratios = (one / other for one, other in zip(ours, theirs, strict=True))
    return {"ours": spread(ours), "theirs": spread(theirs), "ratio": spread(ratios)}


def _further_ms(one_prompt: Numbers, all_prompts: Numbers) -> float:
    seconds = all_prompts["cpu_s"] - one_prompt["cpu_s"]
    return 1000 * seconds / (all_prompts["samples"] - one_prompt["samples"])


@contextmanager
def real_server(target: Path | None, storage: Path) -> Iterator[tuple[Running, Path]]:
    """The generation server of the demo's recipe, without prefix caching, and the target's folder."""
    recipe = load_recipe(str(RECIPE), RECIPE.parent)
    generation = recipe.server.generation.model_copy(update={"extra_args": ("--no-enable-prefix-caching",)})
    model = recipe.target.model_copy(update={"path": target_folder(target), "package": None})
    servers = recipe.server.model_copy(update={"generation": generation})
    lineage = Lineage(recipe.model_copy(update={"target": model, "server": servers}), storage)
    make_target(lineage)
    with open_server(generation_server(lineage), lineage.logs, stop=True) as server:
        yield Running(server.base_url, server.model), lineage.model_path()


@contextmanager
def _given_server(base_url: str, model: str, target: Path | None) -> Iterator[tuple[Running, Path]]:
    yield Running(base_url, model), target_folder(target)


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=4, help="even, so that both begin equally often")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--target", type=Path, help="folder of SmolLM2, by default the demo's")
    parser.add_argument("--base-url", help="a server that runs already, e.g. http://127.0.0.1:8000")
    parser.add_argument("--model", help="the name under which it serves")
    options = parser.parse_args(arguments)
    if bool(options.base_url) != bool(options.model):
        parser.error("--base-url and --model belong together")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    warn_of_changes()
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()][: options.prompts]
    with tempfile.TemporaryDirectory(prefix="regenerate-") as name:
        folder = Path(name)
        if options.base_url:
            server = _given_server(options.base_url, options.model, options.target)
        else:
            server = real_server(options.target, folder / "storage")
        with server as (running, tokenizer):
            contest = Contest(folder, running, tokenizer, options.in_flight, options.max_tokens)
            numbers = hold(contest, texts, options.rounds)
    settings = {
        name: getattr(options, name) for name in ("prompts", "rounds", "in_flight", "max_tokens")
    } | SAMPLING
    if options.base_url:
        print(json.dumps({"settings": settings, **numbers}, indent=2))
    else:
        print(f"written: {record('regenerate', {'settings': settings, **numbers})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
