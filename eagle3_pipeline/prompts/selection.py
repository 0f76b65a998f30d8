"""The prompts of a recipe: its sources in one fixed order, screened until `count` prompts are kept.

<prompts>/prompts.jsonl     one Prompt a line; a smaller count is a prefix of a larger one
          rejected.jsonl    {"where": "file:row", "reason": ..., "detail": ...}
          manifest.json     facts: count, rows_in = kept + rejected, rejected by reason, shards: digest of
                            the prompts of each, which is all that its samples depend on
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import write_atomic
from eagle3_pipeline.errors import BadInput, DamagedFile, MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import MANIFEST_NAME, Manifest, Place, read_manifest
from eagle3_pipeline.prompts.chat_length import ChatLength
from eagle3_pipeline.prompts.evaluation import read_set
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.prompts.screening import Rejection, Screening
from eagle3_pipeline.prompts.sources import Row, read_file, resolve_revision, stream_dataset
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.recipe.settings import Prompts

PROMPTS_NAME = "prompts.jsonl"
REJECTED_NAME = "rejected.jsonl"
_SECONDS_BETWEEN_NEWS = 5

_log = logging.getLogger(__name__)


def make_prompts(lineage: Lineage) -> Manifest:
    """Select and write the prompts of a recipe, unless they are there.

    Raises BadInput if the sources hold fewer usable prompts than `prompts.count`.
    """
    place = lineage.prompts()
    if (made := place.manifest()) is not None:
        return made
    recipe = lineage.recipe
    revisions = _revisions(lineage)
    result = _select(order_rows(recipe, revisions), make_screening(lineage), recipe.prompts.count)
    place.folder.mkdir(parents=True, exist_ok=True)
    rejected = place.folder / REJECTED_NAME
    write_atomic(rejected, _json_lines(rejection.to_json() for rejection in result.rejected))
    if len(result.kept) < recipe.prompts.count:
        raise BadInput(_too_few(recipe, result, rejected))
    prompts = place.folder / PROMPTS_NAME
    write_atomic(prompts, _json_lines(prompt.to_json() for prompt in result.kept))
    shards = digests_of_shards(result.kept, recipe.prompts)
    facts = {"count": recipe.prompts.count, **result.facts, "revisions": revisions, "shards": shards}
    _log.info("prompts: %s", result.summary)
    return place.finish([prompts, rejected], facts)


def digests_of_shards(prompts: list[Prompt], plan: Prompts) -> dict[str, str]:
    """For each shard of the plan, the digest of its prompts' ids and texts; their sources may be renamed."""
    texts = [[one.prompt_id, one.system, list(one.turns)] for one in prompts]
    size = plan.per_shard
    return {
        shard: fingerprint(texts[number * size : (number + 1) * size])
        for number, shard in enumerate(plan.shards)
    }


def read_prompts(place: Place, shard_index: int, per_shard: int) -> list[Prompt]:
    """The prompts of one shard, counted from 0; raises MissingInput and DamagedFile."""
    count = place.require().facts["count"]
    start, end = shard_index * per_shard, (shard_index + 1) * per_shard
    if end > count:
        raise MissingInput(
            f"shard {shard_index} of {per_shard} prompts ends at prompt {end}, but {place.folder} holds "
            f"{count}. Materialise prompts with the recipe of this shard."
        )
    with (place.folder / PROMPTS_NAME).open(encoding="utf-8") as file:
        prompts = [Prompt.from_json(json.loads(line)) for line in islice(file, start, end)]
    if len(prompts) < per_shard:
        raise DamagedFile(
            f"{place.folder / PROMPTS_NAME} has fewer than the {count} prompts of its manifest. "
            f"Delete {place.folder / MANIFEST_NAME} and materialise prompts again."
        )
    return prompts


def make_screening(lineage: Lineage) -> Screening:
    """The screening of a recipe: by its target's tokens, and against all rows of its evaluation sets."""
    recipe = lineage.recipe
    whole_sets = [one.model_copy(update={"count": None}) for one in recipe.evaluation.sets]
    return Screening(
        tokens_of=ChatLength(lineage.model_path(), trust_remote_code=recipe.target.trust_remote_code),
        max_prompt_tokens=recipe.prompts.max_prompt_tokens,
        near_duplicate_similarity=recipe.prompts.near_duplicate_similarity,
        held_out=[prompt for one in whole_sets for prompt in read_set(one)],
    )


def order_rows(recipe: Recipe, revisions: dict[str, str]) -> Iterator[Row]:
    """All rows of all sources, in the order that seed and sources fix, whatever the count.

    Local rows are sorted by a hash of seed, source and row number. Streamed datasets are shuffled in
    a buffer; they and the local rows (all as one) give a row each in turn, until all are at their end.
    """
    seed = recipe.prompts.seed
    local = [
        (hashlib.sha256(f"{seed} {index} {row.number}".encode()).digest(), row)
        for index, source in enumerate(recipe.prompts.sources)
        if source.path is not None
        for row in read_file(source.path, source.column)
    ]
    local.sort(key=lambda pair: pair[0])
    streams: list[Iterator[Row]] = [iter([row for _, row in local])] if local else []
    streams += [
        stream_dataset(source, revisions[source.dataset], seed)
        for source in recipe.prompts.sources
        if source.dataset is not None
    ]
    return _in_turn(streams)


def _in_turn(streams: list[Iterator[Row]]) -> Iterator[Row]:
    while streams:
        going = []
        for stream in streams:
            if (row := next(stream, None)) is not None:
                going.append(stream)
                yield row
        streams = going


@dataclass
class _Selection:
    kept: list[Prompt] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "rows_in": len(self.kept) + len(self.rejected),
            "kept": len(self.kept),
            "rejected": dict(Counter(rejection.reason for rejection in self.rejected).most_common()),
        }
        return {**facts, "kinds": dict(self.kinds.most_common())} if self.kinds else facts

    @property
    def summary(self) -> str:
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.facts["rejected"].items())
        return f"{len(self.kept)} kept of {self.facts['rows_in']} rows; rejected: {reasons or 'none'}"


def _select(rows: Iterable[Row], screening: Screening, count: int) -> _Selection:
    result = _Selection()
    told = time.monotonic()
    for row in rows:
        verdict = screening.judge(row)
        if isinstance(verdict, Rejection):
            result.rejected.append(verdict)
        else:
            result.kept.append(verdict)
            if isinstance(kind := row.value.get("kind"), str):
                result.kinds[kind] += 1
        if len(result.kept) == count:
            break
        if time.monotonic() - told > _SECONDS_BETWEEN_NEWS:
            told = time.monotonic()
            _log.info("prompts: %d of %d; %s", len(result.kept), count, result.summary)
    return result


def _revisions(lineage: Lineage) -> dict[str, str]:
    """The commit of each dataset. The one of earlier prompts is kept: `main` may have moved since."""
    place = lineage.prompts()
    for path in sorted(place.folder.parent.glob(f"*/{MANIFEST_NAME}")):
        made = read_manifest(path)
        if made.inputs.get("sources") == place.inputs["sources"]:
            return dict(made.facts["revisions"])
    return {
        source.dataset: resolve_revision(source)
        for source in lineage.recipe.prompts.sources
        if source.dataset is not None
    }


def _too_few(recipe: Recipe, result: _Selection, rejected: Path) -> str:
    kept, per_shard = len(result.kept), recipe.prompts.per_shard
    fits = kept - kept % per_shard
    way_out = (
        f"Set prompts.count to {fits}, the largest multiple of per_shard {per_shard} that fits"
        if fits
        else f"Lower prompts.per_shard (it is {per_shard}) and prompts.count to at most {kept}"
    )
    return (
        f"the sources give too few prompts for prompts.count {recipe.prompts.count}: {result.summary} "
        f"(each with its place in {rejected}). {way_out}, or add sources."
    )


def _json_lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
