"""What a draft loses by waves and by fp8: acceptance on vLLM of drafts that differ in nothing else.

    python -m benchmarks.extraction.drafts      an hour on two cores; goes on where it was stopped

From the samples of the demo (`--storage`, where `eagle3 run` left them) nine drafts are made, with the seeds
0, 1 and 2 each:

    once     all states at once, in bf16
    waves    the same states in three waves: trained on, deleted, and the next ones
    fp8      all states at once, in fp8

`waves` starts from links to the states of `once`, so that both see the same bits. Each draft answers all 80
prompts of the demo's evaluation set greedily, 16 at a time (which changes no acceptance), 256 tokens each:
about 15,000 drafts, of which one standard error of the accepted tokens is 1.5 %.

What was measured is kept in drafts.jsonl in the folder `--work`, one line for each draft, and is not measured
again; a draft that was being trained goes on from its checkpoint.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.extraction.cosine import bytes_of_states, cosine_by_layer
from benchmarks.extraction.demo_set import SAMPLES, STATES, add_options, own_lineage
from benchmarks.generation.regenerate import spread
from benchmarks.generation.target import RECIPE
from benchmarks.record import record, warn_of_changes
from eagle3_pipeline.evaluation.measurement import Measurement, measure
from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts.evaluation import read_set
from eagle3_pipeline.provenance import git_commit
from eagle3_pipeline.samples.audit import audit_samples
from eagle3_pipeline.serving.lease import hold_partition
from eagle3_pipeline.serving.server import open_server
from eagle3_pipeline.serving.specification import evaluation_server, extraction_server
from eagle3_pipeline.training.training import train_draft
from eagle3_pipeline.vocabulary.mapping import make_vocabulary
from eagle3_pipeline.waves import next_turn

VARIANTS: dict[str, dict[str, Any]] = {
    "once": {},
    "waves": {"waves": 3},
    "fp8": {"precision": "fp8"},
}
SEEDS = (0, 1, 2)
_MEASURED = {"max_completion_tokens": 256, "concurrency": 16}
Line = dict[str, Any]


@dataclass(frozen=True)
class World:
    """The recipe, where its samples are, and where all is made."""

    recipe: Path
    storage: Path
    work: Path

    @property
    def lines(self) -> Path:
        """What was measured so far."""
        return self.work / "drafts.jsonl"

    def lineage(self, variant: str, seed: int) -> Lineage:
        """Waves delete states, so each has a storage root of its own, linked from that of `once`."""
        changes = {"extraction": VARIANTS[variant], "training": {"seed": seed}}
        if variant != "waves":
            folder = self.work / "once"
            return own_lineage(self.recipe, self.storage, folder, changes, SAMPLES)[0]
        of_once = self.work / "once" / "storage"
        return own_lineage(self.recipe, of_once, self.work / f"waves-{seed}", changes, STATES)[0]


def make_draft(lineage: Lineage) -> None:
    """Everything from the audit to the draft, in as many turns as the recipe says."""
    audit_samples(lineage)
    make_vocabulary(lineage)
    while (turn := next_turn(lineage)) is not None:
        server = open_server(extraction_server(lineage, lineage.staging), lineage.logs)
        extract_shards(lineage, turn.shards, server, lambda shard, manifest: None)
        train_draft(lineage, hold_partition(lineage.recipe.partitions.training, "training of a benchmark"))


def evaluate(lineage: Lineage) -> Measurement:
    """The draft on the real server, on all prompts of the first evaluation set."""
    prompts = read_set(lineage.recipe.evaluation.sets[0].model_copy(update={"count": None}))
    settings = lineage.recipe.evaluation.model_copy(update=_MEASURED)
    spec = evaluation_server(lineage, lineage.draft_checkpoint().folder / "draft")
    with open_server(spec, lineage.logs, stop=True) as server:
        return measure(server, prompts, settings, name="benchmark", with_draft=True, request_timeout_s=1200)


def measure_draft(world: World, variant: str, seed: int) -> Line:
    """Make one draft and measure it; the line that is kept."""
    lineage = world.lineage(variant, seed)
    began = time.monotonic()
    make_draft(lineage)
    made_s = time.monotonic() - began
    counts = evaluate(lineage).acceptance
    assert counts is not None
    facts = lineage.draft_checkpoint().require().facts
    return {
        "variant": variant,
        "seed": seed,
        "accepted_per_draft": counts.accepted_tokens / counts.drafts,
        "drafts": counts.drafts,
        "accepted_per_position": list(counts.accepted_per_position),
        "steps": facts["steps"],
        "waited_share": round(facts["waited_seconds"] / facts["seconds"], 4),
        "simulated_acceptance_length": facts["simulated_acceptance_length"],
        "seconds_to_draft": round(made_s, 1),
        "commit": git_commit(),
    }


def measure_missing(
    path: Path, wanted: Iterable[tuple[str, int]], measure_one: Callable[[str, int], Line]
) -> list[Line]:
    """The kept lines and those that are missing of `wanted`, each written as soon as it is there."""
    lines = read_lines(path)
    known = {(line["variant"], line["seed"]) for line in lines}
    for variant, seed in wanted:
        if (variant, seed) in known:
            print(f"{variant}, seed {seed}: measured already", flush=True)
            continue
        line = measure_one(variant, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        lines.append(line)
    return lines


def read_lines(path: Path) -> list[Line]:
    """Whole lines; one that a kill cut is dropped from the file."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def compare(lines: list[Line], variant: str, base: str = "once") -> dict[str, Any]:
    """`variant` beside `base`, seed by seed: the accepted tokens per draft, and the acceptance length."""
    by_seed: dict[str, dict[int, float]] = {
        name: {line["seed"]: line["accepted_per_draft"] for line in lines if line["variant"] == name}
        for name in (base, variant)
    }
    seeds = sorted(by_seed[base].keys() & by_seed[variant].keys())
    ones, others = ([by_seed[name][seed] for seed in seeds] for name in (base, variant))
    pairs = list(zip(ones, others, strict=True))
    return {
        "seeds": seeds,
        "accepted_per_draft": {base: spread(ones), variant: spread(others)},
        "ratio_of_accepted": spread(other / one for one, other in pairs),
        "ratio_of_mean_accepted": round(statistics.mean(others) / statistics.mean(ones), 4),
        "ratio_of_acceptance_length": spread((1 + other) / (1 + one) for one, other in pairs),
        "drafts": [line for line in lines if line["variant"] in (base, variant)],
    }


def conclude(world: World, lines: list[Line], variant: str) -> dict[str, Any]:
    """What main records of a variant."""
    found: dict[str, Any] = {"evaluation": _MEASURED, **compare(lines, variant)}
    seed = found["seeds"][0]
    if variant == "fp8":
        once, fp8 = (world.lineage(name, seed) for name in ("once", variant))
        sizes = [bytes_of_states(lineage) for lineage in (once, fp8)]
        found["bytes"] = {"bf16": sizes[0], "fp8": sizes[1], "ratio": round(sizes[1] / sizes[0], 4)}
        found["cosine_by_layer"] = cosine_by_layer(once, fp8)
    else:
        found["waves"] = [list(wave) for wave in world.lineage(variant, seed).waves()[0]]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument(
        "--work", type=Path, help="folder for all that is made, by default in the storage root"
    )
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    warn_of_changes()
    work = options.work or options.storage / "benchmark-drafts"
    world = World(options.recipe, options.storage, work)
    variants = ["once", *(name for name in options.variants if name != "once")]
    wanted = [(variant, seed) for variant in variants for seed in options.seeds]
    lines = measure_missing(world.lines, wanted, lambda *which: measure_draft(world, *which))
    for variant in variants[1:]:
        numbers = conclude(world, lines, variant)
        if options.recipe == RECIPE and set(numbers["seeds"]) >= set(SEEDS):
            print(f"written: {record(variant, numbers)}")
        else:
            print(json.dumps(numbers, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
