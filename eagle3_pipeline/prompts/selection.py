"""The prompts of a recipe: its sources in one fixed order, screened until `count` prompts are kept.

<prompts>/prompts.jsonl     one Prompt a line; a smaller count is a prefix of a larger one
          rejected.jsonl    {"where": "file:row", "reason": ..., "detail": ...}
          manifest.json     facts: count, rows_in = kept + rejected, rejected by reason with an example of
                            each, sources, revisions of datasets, validation: ids of the prompts that
                            judge, the first ones; shards: digest of the prompts of each, which is all
                            that its samples depend on
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import write_atomic
from eagle3_pipeline.errors import BadInput, DamagedFile, MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import MANIFEST_NAME, Manifest, Place
from eagle3_pipeline.prompts.chat_length import ChatLength
from eagle3_pipeline.prompts.evaluation import read_set
from eagle3_pipeline.prompts.mixture import Mixture, Strand, mix_sources
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.prompts.revisions import revisions
from eagle3_pipeline.prompts.screening import Rejection, Screening
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.recipe.prompts import Prompts

PROMPTS_NAME = "prompts.jsonl"
REJECTED_NAME = "rejected.jsonl"
_SECONDS_BETWEEN_NEWS = 5
_LONGEST_DETAIL = 200  # characters in the manifest: a detail may list a hundred columns

_log = logging.getLogger(__name__)


def make_prompts(lineage: Lineage) -> Manifest:
    """Select and write the prompts of a recipe, unless they are there.

    Raises BadInput if the sources hold fewer usable prompts than `prompts.count`.
    """
    place = lineage.prompts()
    if (made := place.manifest()) is not None:
        return made
    recipe = lineage.recipe
    commits = revisions(lineage)
    result = _select(mix_sources(recipe, commits), make_screening(lineage), recipe.prompts.count)
    place.folder.mkdir(parents=True, exist_ok=True)
    rejected = place.folder / REJECTED_NAME
    write_atomic(rejected, _json_lines(rejection.to_json() for rejection in result.rejected))
    if len(result.kept) < recipe.prompts.count:
        raise BadInput(_too_few(recipe, result, rejected))
    prompts = place.folder / PROMPTS_NAME
    write_atomic(prompts, _json_lines(prompt.to_json() for prompt in result.kept))
    shards = digests_of_shards(result.kept, recipe.prompts)
    facts = {
        "count": recipe.prompts.count,
        **result.facts,
        "revisions": commits,
        "validation": [one.prompt_id for one in result.kept[: recipe.prompts.validation_prompts]],
        "shards": shards,
    }
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
        validation=recipe.prompts.validation_prompts,
    )


@dataclass
class _Selection:
    strands: list[Strand]
    kept: list[Prompt] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "rows_in": self._rows_in,
            "kept": len(self.kept),
            "rejected": self._rejected_by_reason,
            "screening": self._screening,
            "sources": [strand.facts for strand in self.strands],
        }
        return {**facts, "kinds": dict(self.kinds.most_common())} if self.kinds else facts

    @property
    def summary(self) -> str:
        reasons = ", ".join(f"{number} {reason}" for reason, number in self._rejected_by_reason.items())
        return f"{len(self.kept)} kept of {self._rows_in} rows; rejected: {reasons or 'none'}"

    @property
    def _rows_in(self) -> int:
        return sum(strand.taken for strand in self.strands)

    @property
    def _screening(self) -> list[dict[str, Any]]:
        """A line per fate of rows, with the first row that met it; `rows` adds up to rows_in."""
        first: dict[str, Rejection] = {one.reason: one for one in reversed(self.rejected)}
        lines = [_line("kept", len(self.kept), self._rows_in)]
        for reason, rows in self._rejected_by_reason.items():
            example = first[reason]
            lines.append(_line(reason, rows, self._rows_in, example.where, example.detail))
        return lines

    @property
    def _rejected_by_reason(self) -> dict[str, int]:
        return dict(Counter(str(one.reason) for one in self.rejected).most_common())


def _line(reason: str, rows: int, rows_in: int, example: str = "", detail: str = "") -> dict[str, Any]:
    share = round(rows / rows_in, 4) if rows_in else 0.0
    detail = detail[:_LONGEST_DETAIL]
    return {"reason": reason, "rows": rows, "share": share, "example": example, "detail": detail}


def _select(rows: Mixture, screening: Screening, count: int) -> _Selection:
    result = _Selection(rows.strands)
    told = time.monotonic()
    for row in rows:
        verdict = screening.judge(row)
        if isinstance(verdict, Rejection):
            result.rejected.append(verdict)
        else:
            rows.keep()
            result.kept.append(verdict)
            if isinstance(kind := row.value.get("kind"), str):
                result.kinds[kind] += 1
        if len(result.kept) == count:
            break
        if time.monotonic() - told > _SECONDS_BETWEEN_NEWS:
            told = time.monotonic()
            _log.info("prompts: %d of %d; %s", len(result.kept), count, result.summary)
    return result


def _too_few(recipe: Recipe, result: _Selection, rejected: Path) -> str:
    kept, per_shard = len(result.kept), recipe.prompts.per_shard
    fits = kept - kept % per_shard
    way_out = (
        f"Set prompts.count to {fits}, the largest multiple of per_shard {per_shard} that fits"
        if fits
        else f"Lower prompts.per_shard (it is {per_shard}) and prompts.count to at most {kept}"
    )
    near = sum(one.reason == "near_validation" for one in result.rejected)
    fewer = f", lower prompts.validation ({near} rows are near to those prompts)" if near else ""
    return (
        f"the sources give too few prompts for prompts.count {recipe.prompts.count}: {result.summary} "
        f"(each with its place in {rejected}). {way_out}{fewer}, or add sources."
    )


def _json_lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
