"""How many bytes the hidden states of the samples take, in each form that the recipe could choose.

A sample counts with the first tokens that are extracted of it (extracted_form.py); one whose whole
completion is cut away by that trains nothing and counts with none. The bytes are those of the states
and their scales; token ids, masks and headers are less than a hundredth of them and are left to
`storage.keep_free_gib`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe.extraction import Kept, Precision
from eagle3_pipeline.samples.extracted_form import layout_of, longest_sample
from eagle3_pipeline.samples.folder_bytes import bytes_below
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, trained_of_prompts
from eagle3_pipeline.shards.consumption import consumption
from eagle3_pipeline.shards.format import ShardLayout

# The draft proposes from the second token of a reply on.
_FEWEST_REPLY_TOKENS = 2

FORMS: dict[str, tuple[Precision, Kept]] = {
    "bf16": ("bf16", "all"),
    "bf16 trained": ("bf16", "trained"),
    "fp8": ("fp8", "all"),
    "fp8 trained": ("fp8", "trained"),
}
"""Name of each form that states can be kept in: precision, and what is kept."""


@dataclass(frozen=True)
class ShardLengths:
    """One shard: tokens of (prompt, prompt + completion) of each sample that trains or judges."""

    shard: str
    lengths: list[tuple[int, int]]
    is_extracted: bool
    """Its states are on the disk already."""
    written: int = 0
    """Bytes of the parts of a shard that is not finished yet."""
    captured: int = 0
    """Bytes of the files that came with its replies and wait for the shard."""
    judging: int = 0
    """So many of `lengths`, the first ones, are of samples that judge the draft."""

    def tokens(self, longest: int) -> int:
        """Tokens to extract when samples are cut to `longest`."""
        return sum(min(total, longest) for prompt, total in self.lengths if prompt < min(total, longest))

    def completion_tokens(self, longest: int) -> int:
        """Those of them that the target wrote."""
        return sum(max(min(total, longest) - prompt, 0) for prompt, total in self.lengths)


@dataclass(frozen=True)
class BytePlan:
    """The extraction of a run, in tokens and bytes; `dataclasses.replace` gives what another choice takes."""

    shards: list[ShardLengths]
    longest: int
    layout: ShardLayout
    while_generating: bool = False
    """States come with the replies and wait, each sample in a file, until their shard is written."""

    @property
    def tokens(self) -> int:
        """Tokens to extract in all."""
        return sum(one.tokens(self.longest) for one in self.shards)

    @property
    def trained_samples(self) -> int:
        """Samples of which something is left to train on when they are cut."""
        return sum(prompt < min(total, self.longest) for one in self.shards for prompt, total in one.lengths)

    @cached_property
    def training(self) -> list[int]:
        """Samples of each shard that train when they are cut: two tokens of a reply are one to learn from."""
        return [sum(self._supervised(one)[one.judging :]) for one in self.shards]

    @property
    def judges(self) -> int:
        """Samples that judge, in the same way."""
        return sum(sum(self._supervised(one)[: one.judging]) for one in self.shards)

    def _supervised(self, shard: ShardLengths) -> list[bool]:
        """Of each sample; the last token of a reply is not read by a server that captures its states."""
        return [
            min(total - self.while_generating, self.longest) - prompt >= _FEWEST_REPLY_TOKENS
            for prompt, total in shard.lengths
        ]

    @property
    def bytes(self) -> int:
        """Bytes of the states of all shards."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of the states of each shard."""
        return [self._bytes_of(one) for one in self.shards]

    @property
    def validation_bytes(self) -> int:
        """Bytes of the states of the samples that judge."""
        return sum(self._bytes_of(replace(one, lengths=one.lengths[: one.judging])) for one in self.shards)

    @cached_property
    def missing(self) -> list[int]:
        """Bytes of each shard that are still to be written."""
        return [
            0 if one.is_extracted else max(size - one.written, 0)
            for one, size in zip(self.shards, self.sizes, strict=True)
        ]

    @cached_property
    def to_come(self) -> int:
        """Bytes of states that no server has captured yet: bfloat16 and whole, whatever their form will be.

        Those that come with the replies are not even cut to `longest`.
        """
        whole = replace(
            self.in_form(*FORMS["bf16"]),
            longest=max((total for one in self.shards for _, total in one.lengths), default=0)
            if self.while_generating
            else self.longest,
        )
        missing = zip(self.shards, whole.missing, strict=True)
        return sum(max(count - one.captured, 0) for one, count in missing)

    @property
    def at_once(self) -> int:
        """Bytes that are still to be written until the states of all shards are there.

        Files that came with the replies go when their shard is made, so beside those there is one shard more.
        """
        return self.to_come + max(self.missing, default=0) if self.while_generating else sum(self.missing)

    def in_form(self, precision: Precision, kept: Kept) -> "BytePlan":
        """The same samples in another form."""
        return replace(self, layout=replace(self.layout, precision=precision, kept=kept))

    def forms(self) -> dict[str, int]:
        """Bytes of the whole set in each form, by its name: `bf16`, `bf16 trained`, `fp8`, `fp8 trained`."""
        return {name: self.in_form(*form).bytes for name, form in FORMS.items()}

    def numbers(self) -> dict[str, Any]:
        """The plan as facts: samples and tokens that train, cut samples, bytes in all and by form."""
        lengths = [length for one in self.shards for length in one.lengths]
        return {
            "trained_samples": self.trained_samples,
            "cut_samples": sum(total > self.longest for _, total in lengths),
            "trained_tokens": self.tokens,
            "bytes_per_token": self.layout.state_bytes(1, 1),
            "bytes_of_states": self.bytes,
            "bytes_by_form": self.forms(),
        }

    def _bytes_of(self, shard: ShardLengths) -> int:
        tokens, trained = shard.tokens(self.longest), shard.completion_tokens(self.longest)
        return self.layout.state_bytes(tokens, trained)


def byte_plan(lineage: Lineage, shards: list[ShardLengths]) -> BytePlan:
    """The plan of these shards with the recipe's own settings; raises MissingInput without a target."""
    return BytePlan(
        shards, longest_sample(lineage), layout_of(lineage), lineage.recipe.extraction.while_generating
    )


def shard_lengths(lineage: Lineage, shard: str, lengths: list[tuple[int, int]]) -> ShardLengths:
    """Lengths of a shard, with what of its states lies on the disk."""
    missing = ShardLengths(shard, lengths, is_extracted=False, judging=_judging(lineage, shard, len(lengths)))
    captured = _captured(lineage, shard)
    try:
        place = lineage.hidden_state_shards(shard)
    except MissingInput:  # no samples, so no states
        return replace(missing, captured=captured)
    if consumption(place.folder) is not None:  # deleted; whoever plans anew makes them anew
        return missing
    if place.manifest() is not None:
        return replace(missing, is_extracted=True)
    parts = sum(part.stat().st_size for part in place.folder.glob("part-*.safetensors"))
    return replace(missing, written=parts, captured=captured)


def _judging(lineage: Lineage, shard: str, samples: int) -> int:
    """How many samples of a shard judge: those of the first prompts of all, so the first ones.

    Of a shard that is not made these prompts are expected to have as many samples as its others.
    """
    recipe = lineage.recipe
    if shard != recipe.prompts.shards[0]:
        return 0
    expected = -(-samples * recipe.prompts.validation_prompts // recipe.prompts.per_shard)
    try:
        place, prompts = lineage.synthetic_samples(shard), lineage.prompts().require()
    except MissingInput:
        return expected
    if place.manifest() is None:
        return expected
    judges = set(prompts.facts["validation"])
    return trained_of_prompts(place.folder / SAMPLES_NAME, recipe.generation.train_truncated, judges)


def _captured(lineage: Lineage, shard: str) -> int:
    if not lineage.recipe.extraction.while_generating:
        return 0
    try:
        return bytes_below(lineage.captured(shard))
    except MissingInput:  # no prompts, so no replies
        return 0
