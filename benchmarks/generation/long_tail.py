"""25,000 prompts, 50 shards, 200 in flight, replies with a long tail: this step beside speculators' client.

    python -m benchmarks.generation.long_tail                   15 minutes; writes the result
    python -m benchmarks.generation.long_tail --prompts 2500    2 minutes; prints it only

One after the other, each with a stand-in server of its own, on the same prompts:

    ours       collect_samples over all shards
    theirs     speculators regenerate-responses
    barrier    collect_samples shard after shard, for the first fifth of the shards
    kills      ours, while the server is killed five times; asserts that nothing is lost and nothing twice
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.generation.events import busy_share, moment, read_events
from benchmarks.generation.kills import check_lives, check_shards, survive
from benchmarks.generation.load import Load, invented, recipe_of, serving, write_dataset, write_lineage
from benchmarks.generation.process import Usage, run
from benchmarks.generation.target import target_folder
from benchmarks.generation.theirs import regenerate
from benchmarks.record import record

KILLS = 5
VARIANTS = ("ours", "theirs", "barrier", "kills")
_SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": -1}


def make_world(folder: Path, load: Load) -> tuple[Any, Path]:
    """The lineage of a variant, in a new folder, and its recipe's path."""
    texts = invented(load.prompts)
    generation = {"concurrency": load.in_flight, "max_completion_tokens": load.longest, **_SAMPLING}
    return write_lineage(folder, recipe_of(texts, load.per_shard, generation), texts)


def _numbers(events: Any, usage: Usage, load: Load) -> dict[str, float]:
    replies = int((events["tokens"] > 0).sum())
    seconds = float(events["time"][-1] - events["time"][0])
    at = {share: usage.bytes_at(moment(events, share)) / 2**20 for share in (0.2, 0.95)}
    return {
        "replies": replies,
        "slots_busy": round(busy_share(events, load.in_flight), 4),
        "seconds": round(seconds, 1),
        "requests_per_second": round(replies / seconds, 2),
        "mean_tokens": round(float(events["tokens"][events["tokens"] > 0].mean()), 1),
        "cpu_ms_per_sample": round(1000 * usage.cpu_s / replies, 3),
        "peak_mib": round(usage.peak_bytes / 2**20, 1),
        "mib_at_20_percent": round(at[0.2], 1),
        "mib_at_95_percent": round(at[0.95], 1),
    }


def measure_ours(folder: Path, load: Load, *, barrier: bool = False) -> dict[str, float]:
    """The step over all shards, or, with a barrier, over the first fifth of them, one by one."""
    lineage, recipe = make_world(folder, load)
    events = folder / "events.bin"
    with serving(events, load.ms_per_token) as running:
        command = [sys.executable, "-m", "benchmarks.generation.ours", str(recipe), str(lineage.storage_root)]
        command += ["--base-url", running.base_url, "--model", running.model]
        command += ["--shard-by-shard", "--first", str(load.shards // 5)] if barrier else []
        usage = run(command, folder)
    if not barrier:
        check_shards(lineage, [read_events(events)])
        check_lives([read_events(events)], [set()])
    return _numbers(read_events(events), usage, load)


def measure_theirs(folder: Path, load: Load, tokenizer: Path) -> dict[str, float]:
    """speculators' client on the same prompts."""
    folder.mkdir(parents=True)
    dataset = write_dataset(folder / "prompts.jsonl", invented(load.prompts))
    events = folder / "events.bin"
    with serving(events, load.ms_per_token) as running:
        usage, _ = regenerate(
            folder / "theirs",
            dataset,
            running.base_url,
            running.model,
            tokenizer,
            in_flight=load.in_flight,
            max_tokens=load.longest,
            sampling=_SAMPLING,
        )
    return _numbers(read_events(events), usage, load)


def measure(load: Load, variants: list[str], target: Path | None) -> dict[str, Any]:
    """All variants, one after the other, in folders that are removed behind them."""
    numbers: dict[str, Any] = {"load": vars(load)}
    for variant in variants:
        with tempfile.TemporaryDirectory(prefix="long-tail-") as name:
            folder = Path(name) / variant
            if variant == "theirs":
                numbers[variant] = measure_theirs(folder, load, target_folder(target))
            elif variant == "kills":
                lineage, _ = make_world(folder, load)
                numbers[variant] = survive(lineage, folder, load, KILLS)
            else:
                numbers[variant] = measure_ours(folder, load, barrier=variant == "barrier")
        print(variant, json.dumps(numbers[variant]), flush=True)
    if "ours" in numbers:
        numbers["ratios_to_ours"] = _ratios(numbers)
    return numbers


def _ratios(numbers: dict[str, Any]) -> dict[str, dict[str, float]]:
    names = ("slots_busy", "requests_per_second", "cpu_ms_per_sample", "peak_mib")
    ours = numbers["ours"]
    return {
        variant: {name: round(numbers[variant][name] / ours[name], 3) for name in names}
        for variant in ("theirs", "barrier")
        if variant in numbers
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=Load.prompts, help="a multiple of 50")
    parser.add_argument("--ms-per-token", type=float, default=Load.ms_per_token)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--target", type=Path, help="folder of a model whose tokenizer speculators takes")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    load = Load(prompts=options.prompts, ms_per_token=options.ms_per_token)
    numbers = measure(load, options.variants, options.target)
    if load == Load() and options.variants == list(VARIANTS):
        print(f"written: {record('long-tail', numbers)}")
    else:
        print(json.dumps(numbers.get("ratios_to_ours", {}), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
