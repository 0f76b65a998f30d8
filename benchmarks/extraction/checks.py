"""What the checks of extraction cost: their time on recorded states, beside the time of the extraction.

    python -m benchmarks.extraction.checks      2 minutes; after benchmarks.extraction.throughput

The states are those of the demo's shards (`--storage`, where `eagle3 run` left them), taken one by one as the
step takes them: ids, shape and values (`values`), the layers' scales and correlations (`layers`), and whether
the last layer's states mean the recorded tokens (`meaning`). Each check works on one core. The extraction's
speed is that of results/extraction.json, or `--tokens-per-second`.

One sample in a hundred is also extracted again, alone: that is time of the server, and is in the ratio of
extraction to prefill.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.extraction.demo_set import add_options
from benchmarks.generation.regenerate import spread
from benchmarks.generation.target import RECIPE
from benchmarks.record import RESULTS, record, warn_of_changes
from eagle3_pipeline.extraction.checks import reason_against
from eagle3_pipeline.extraction.head import Head
from eagle3_pipeline.extraction.layer_table import LayerTable
from eagle3_pipeline.extraction.plan import PlannedSample, plan_shard
from eagle3_pipeline.extraction.shard_meaning import ShardMeaning
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.samples.extracted_form import longest_sample
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, iter_samples
from eagle3_pipeline.shards.reader import ShardReader

CHECKS = ("values", "layers", "meaning")


class Costs:
    """Seconds of each check over the samples of a recipe."""

    def __init__(self, lineage: Lineage) -> None:
        self._lineage = lineage
        self._head = Head.read(lineage.model_path())
        self.samples = self.tokens = 0
        self.found: list[str] = []
        """What the checks said against these states."""
        self.seconds = dict.fromkeys(CHECKS, 0.0)

    def measure(self) -> None:
        """Check all shards; raises MissingInput where one is not made."""
        recipe = self._lineage.recipe
        table = LayerTable(recipe.extraction.layers)
        for shard in recipe.shards:
            reader = ShardReader([self._lineage.hidden_state_shards(shard).folder])
            meaning = ShardMeaning(self._head, self._planned(shard), recipe.generation, seed=0)
            for index, sample_id in enumerate(reader.sample_ids):
                self._sample(sample_id, reader[index], table, meaning)
            self._timed("meaning", meaning.verdict)

    def _planned(self, shard: str) -> list[PlannedSample]:
        samples = iter_samples(self._lineage.synthetic_samples(shard).folder / SAMPLES_NAME)
        truncated = self._lineage.recipe.generation.train_truncated
        return plan_shard(samples, train_truncated=truncated, longest=longest_sample(self._lineage)).samples

    def _sample(
        self, sample_id: str, sample: dict[str, torch.Tensor], table: LayerTable, meaning: ShardMeaning
    ) -> None:
        states, ids, mask = (sample[name] for name in ("hidden_states", "token_ids", "loss_mask"))
        wanted = ids.tolist()
        _, layers, hidden = states.shape

        def compare() -> str | None:
            reason = table.judge(states)
            table.add(states)
            return reason

        self._timed("values", lambda: reason_against(wanted, ids, states, layers, hidden))
        self._timed("layers", compare)
        self._timed("meaning", lambda: meaning.look(sample_id, ids, mask, states[:, -1]))
        self.samples += 1
        self.tokens += len(wanted)

    def _timed(self, name: str, check: Callable[[], str | None]) -> None:
        began = time.perf_counter()
        said = check()
        self.seconds[name] += time.perf_counter() - began
        if said is not None:
            self.found.append(said)


def summary(rounds: list[Costs], tokens_per_second: float) -> dict[str, Any]:
    """Milliseconds per sample and share of the extraction's time, of each check and of all."""
    first = rounds[0]
    extraction_s = first.tokens / tokens_per_second
    by_check = {name: [one.seconds[name] for one in rounds] for name in CHECKS}
    by_check["all"] = [sum(one.seconds.values()) for one in rounds]
    return {
        "samples": first.samples,
        "tokens": first.tokens,
        "extraction_tokens_per_second": tokens_per_second,
        "ms_per_sample": {
            name: spread(1000 * one / first.samples for one in values) for name, values in by_check.items()
        },
        "share_of_extraction": {
            name: spread(one / extraction_s for one in values) for name, values in by_check.items()
        },
        "said": first.found,
    }


def _recorded_speed() -> float:
    path = RESULTS / "extraction.json"
    if not path.exists():
        raise SystemExit(
            f"no {path}: run benchmarks.extraction.throughput first, or give --tokens-per-second"
        )
    return float(json.loads(path.read_text())["numbers"]["tokens_per_second"]["extraction"]["median"])


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens-per-second", type=float, help="speed of the extraction")
    options = parser.parse_args(arguments)
    warn_of_changes()
    torch.set_num_threads(1)
    speed = options.tokens_per_second or _recorded_speed()
    lineage = Lineage(load_recipe(str(options.recipe), options.recipe.parent), options.storage)
    rounds = []
    for _ in range(options.rounds + 1):
        rounds.append(Costs(lineage))
        rounds[-1].measure()
    numbers = summary(rounds[1:], speed)  # the first one reads the states from the disk
    print(json.dumps(numbers, indent=2))
    if options.recipe == RECIPE:
        print(f"written: {record('extraction-checks', numbers)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
