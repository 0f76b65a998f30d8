"""Acceptance on vLLM of drafts by this project's training and by `speculators train`, from the same samples.

    python -m benchmarks.training.quality --prompts FOLDER      an hour and a half on two cores

The samples are those of the demo (`--storage`, where `eagle3 run` left them). With the seeds 0, 1 and 2 each,
these drafts are made:

    ours          the recipe's settings, as they stand
    frozen_head   the same without training the head, which is what speculators does
    same_steps    `speculators train` with its defaults, as many steps of as many tokens
    same_time     the same, as many steps as it does in the seconds that `ours` trained

Given to speculators are samples, states, draft vocabulary, layers, number of steps and their tokens, and the
seed; optimizer, rates, schedule, norms, attention, loss weights, split and choice of the best are its own
(theirs.py). Seconds are those of training steps, reading included: no imports, validation and checkpoints.

All drafts are made first, `ours` and `same_steps` before the others: the machine should do nothing else until
those six are there. Each draft answers the first 12 prompts of each *.jsonl in FOLDER (by default
EAGLE3_SPEC_EVAL) greedily, 3 speculative tokens, 16 at a time (which changes no acceptance), 256 tokens each.

What was made and measured is kept in made.jsonl and measured.jsonl in the folder `--work`, one line for each
draft, and is not done again.
"""

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.extraction.demo_set import STATES, add_options, own_lineage
from benchmarks.extraction.drafts import Line, compare, measure_missing, read_lines
from benchmarks.generation.process import run
from benchmarks.generation.target import RECIPE
from benchmarks.record import record, warn_of_changes
from benchmarks.training.their_data import write_their_data
from benchmarks.training.theirs import CHECKPOINT, CPU_OPTIONS, command, workload_options
from benchmarks.training.workload import plan_of, quiet_environment
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.measurement import measure
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts.evaluation import read_set
from eagle3_pipeline.provenance import git_commit
from eagle3_pipeline.recipe.evaluation import EvaluationSet
from eagle3_pipeline.serving.lease import hold_partition
from eagle3_pipeline.serving.server import open_server
from eagle3_pipeline.serving.specification import evaluation_server
from eagle3_pipeline.training.training import train_draft

OURS: dict[str, dict[str, Any]] = {"ours": {}, "frozen_head": {"train_head": False}}
THEIRS = ("same_steps", "same_time")
VARIANTS = (*OURS, *THEIRS)
TIMED = ("ours", "same_steps")
"""Those whose seconds say how long `same_time` may train."""
SEEDS = (0, 1, 2)
_MEASURED = {"max_completion_tokens": 256, "concurrency": 16, "temperature": 0.0}
_PROMPTS_OF_A_SET = 12
_REQUEST_TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class World:
    """The recipe, where its samples are, the prompts to measure with, and where all is made."""

    recipe: Path
    storage: Path
    prompts: Path
    work: Path

    def journal(self, what: str) -> Path:
        """One line for each draft that is `made`, or `measured`."""
        return self.work / f"{what}.jsonl"

    def made_of(self, seed: int) -> dict[str, Line]:
        """The lines of the drafts with this seed that were made, by variant."""
        return {line["variant"]: line for line in read_lines(self.journal("made")) if line["seed"] == seed}

    def draft(self, variant: str, seed: int) -> Path:
        """The folder of a draft that was made."""
        return self.work / "drafts" / f"{variant}-{seed}"

    def lineage(self, seed: int, **training: Any) -> Lineage:
        """The recipe with another seed; all drafts share samples and states."""
        changes = {"training": {"seed": seed, **training}}
        return own_lineage(self.recipe, self.storage, self.work / "own", changes, STATES)[0]

    def sets(self) -> list[EvaluationSet]:
        """The prompt sets, by name; each has the user's turns in a column `turns`."""
        files = sorted(self.prompts.glob("*.jsonl"))
        if not files:
            raise SystemExit(f"no *.jsonl in {self.prompts}: name the folder of the prompts with --prompts")
        return [
            EvaluationSet(name=file.stem, path=file, column="turns", count=_PROMPTS_OF_A_SET)
            for file in files
        ]


def make_draft(world: World, variant: str, seed: int) -> Line:
    """Train one draft and keep it; the line that is kept of its training."""
    lineage = world.lineage(seed, **OURS.get(variant, {}))
    if variant in OURS:
        draft, training = train_ours(lineage)
    else:
        steps = steps_of(variant, world.made_of(seed).values())
        draft, training = train_theirs(lineage, world.work / "theirs", world.work / "data", steps)
    shutil.copytree(draft, world.draft(variant, seed), dirs_exist_ok=True)
    return {"variant": variant, "seed": seed, "training": training, "commit": git_commit()}


def measure_draft(world: World, variant: str, seed: int) -> Line:
    """Serve one draft; the line that is kept."""
    by_set = evaluate(world.lineage(seed), world.draft(variant, seed), world.sets())
    counts = AcceptanceCounts.sum(by_set.values())
    return {
        **world.made_of(seed)[variant],
        "accepted_per_draft": counts.accepted_tokens / counts.drafts,
        "drafts": counts.drafts,
        "accepted_per_position": list(counts.accepted_per_position),
        "by_set": {name: asdict(one) for name, one in by_set.items()},
    }


def train_ours(lineage: Lineage) -> tuple[Path, dict[str, float]]:
    """The draft's folder, and steps and seconds of its training."""
    plan_of(lineage)
    train_draft(lineage, hold_partition(lineage.recipe.partitions.training, "training of a benchmark"))
    place = lineage.draft_checkpoint()
    facts = place.require().facts
    seconds, steps = float(facts["seconds"]), int(facts["steps"])
    return place.folder / "draft", {
        "steps": steps,
        "tokens": facts["tokens"],
        "seconds": seconds,
        "seconds_per_step": round(seconds / steps, 4),
        "simulated_acceptance_length": facts["simulated_acceptance_length"],
    }


def train_theirs(lineage: Lineage, folder: Path, data: Path, steps: int) -> tuple[Path, dict[str, float]]:
    """The folder of its best checkpoint as it left it, and what its clock says."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plan = plan_of(lineage)
    options = [*workload_options(plan, write_their_data(data, plan), folder, steps), *CPU_OPTIONS]
    numbers = folder / "numbers.json"
    with hold_partition(lineage.recipe.partitions.training, "training of a benchmark"):
        run(command(numbers, options), folder, quiet_environment(()))
    found: dict[str, float] = json.loads(numbers.read_text())
    return (folder / "checkpoints" / CHECKPOINT).resolve(), found


def steps_of(variant: str, lines: Iterable[Line]) -> int:
    """How long speculators trains, by what the drafts of the same seed took."""
    training = {line["variant"]: line["training"] for line in lines}
    if variant == "same_steps":
        return int(training["ours"]["steps"])
    return max(2, round(training["ours"]["seconds"] / training["same_steps"]["seconds_per_step"]))


def evaluate(lineage: Lineage, draft: Path, sets: list[EvaluationSet]) -> dict[str, AcceptanceCounts]:
    """What the real server counts with the draft, set by set."""
    settings = lineage.recipe.evaluation.model_copy(update=_MEASURED)
    counts: dict[str, AcceptanceCounts] = {}
    with open_server(evaluation_server(lineage, draft), lineage.logs, stop=True) as server:
        for one in sets:
            found = measure(
                server,
                read_set(one),
                settings,
                name=one.name,
                with_draft=True,
                request_timeout_s=_REQUEST_TIMEOUT_S,
            ).acceptance
            assert found is not None
            counts[one.name] = found
    return counts


def conclude(lines: list[Line]) -> dict[str, Any]:
    """What main records: ours beside each of theirs, what the head gives, and all lines."""
    found: dict[str, Any] = {
        f"ours_to_{base}": _beside(lines, "ours", base) for base in ("same_steps", "same_time", "frozen_head")
    }
    found["frozen_head_to_same_steps"] = _beside(lines, "frozen_head", "same_steps")
    found["accepted_per_draft_by_set"] = {
        variant: by_set([line for line in lines if line["variant"] == variant]) for variant in VARIANTS
    }
    return {**found, "drafts": lines}


def _beside(lines: list[Line], variant: str, base: str) -> dict[str, Any]:
    found = compare(lines, variant, base)
    del found["drafts"]
    return found


def by_set(lines: list[Line]) -> dict[str, float]:
    """Accepted tokens per draft of each set, over all seeds."""
    totals: dict[str, list[AcceptanceCounts]] = {}
    for line in lines:
        for name, counts in line["by_set"].items():
            totals.setdefault(name, []).append(AcceptanceCounts.from_json(counts))
    sums = {name: AcceptanceCounts.sum(counts) for name, counts in totals.items()}
    return {name: round(one.accepted_tokens / one.drafts, 4) for name, one in sums.items()}


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    prompts = os.environ.get("EAGLE3_SPEC_EVAL")
    parser.add_argument(
        "--prompts", type=Path, default=prompts, required=prompts is None, help="folder of prompt sets"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for all that is made, by default in the storage root"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    warn_of_changes()
    work = options.work or options.storage / "benchmark-quality"
    world = World(options.recipe, options.storage, Path(options.prompts), work)
    world.sets()
    timed = [(variant, seed) for seed in options.seeds for variant in TIMED]
    others = [(variant, seed) for variant in VARIANTS if variant not in TIMED for seed in options.seeds]
    wanted = [which for which in (*timed, *others) if which[0] in options.variants]
    measure_missing(world.journal("made"), wanted, lambda *which: make_draft(world, *which))
    lines = measure_missing(world.journal("measured"), wanted, lambda *which: measure_draft(world, *which))
    is_whole = {(variant, seed) for variant in VARIANTS for seed in SEEDS} <= {
        (line["variant"], line["seed"]) for line in lines
    }
    if options.recipe == RECIPE and is_whole:
        numbers = {"evaluation": {**_MEASURED, "prompts_of_a_set": _PROMPTS_OF_A_SET}, **conclude(lines)}
        print(f"written: {record('training-quality', numbers)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
