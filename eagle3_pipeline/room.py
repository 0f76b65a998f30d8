"""Whether what a recipe still has to make fits this machine, asked before anything long starts.

Lengths of completions are unknown then, so room for states is judged by two bounds: a run whose states do not
fit even if completions are short is refused, one that fits only then is warned about. `sample_audit`
knows the real lengths and decides for good: once it has passed, room for states is not judged again here.
"""

import logging

from eagle3_pipeline.errors import MissingInput, NotEnoughRoom
from eagle3_pipeline.host_memory import available_bytes
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.samples.byte_plan import BytePlan, byte_plan, shard_lengths
from eagle3_pipeline.samples.fitting import Fit, in_words
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, trained_lengths
from eagle3_pipeline.samples.state_room import gib
from eagle3_pipeline.serving.server import running_servers

logger = logging.getLogger(__name__)

_SHORT, _LONG = 0.1, 0.5  # mean completion as a share of max_completion_tokens
# What one vLLM process on the CPU takes beside weights and KV cache: libraries, compiled code,
# activations. Measured on SmolLM2: 2.1 GiB.
_SERVER_OVERHEAD_BYTES = int(2.5 * 2**30)


def require_machine(lineage: Lineage) -> None:
    """Raise NotEnoughRoom if memory or disk cannot do for what is missing; MissingInput without a target."""
    if lineage.released() is not None:
        return
    recipe = lineage.recipe
    # A server of ours is used or stopped by the next step: the memory that it holds is not missing.
    if not recipe.partitions.generation and not any(one.overlaps(()) for one in running_servers()):
        _require_memory(recipe, int(lineage.target_model().require().facts["bytes"]))
    if is_audited(lineage):
        return  # what fits is decided, and the extraction looks at the room of its next shards
    short, long = expected_fits(lineage)
    if not short.fits:
        raise NotEnoughRoom(
            f"even at a mean of {recipe.generation.max_completion_tokens * _SHORT:.0f} completion tokens, "
            f"{in_words(short)}, but {short.room.why}. Choices: {'; '.join(short.choices())}."
        )
    if not long.fits:
        logger.warning(
            "the hidden states may not fit: %s; completions of %.0f tokens would take %s at once. "
            "sample_audit decides when the lengths are known.",
            long.room.why,
            recipe.generation.max_completion_tokens * _LONG,
            gib(long.wave_plan.needed),
        )


def is_audited(lineage: Lineage) -> bool:
    """Whether sample_audit has passed over all shards of the run."""
    try:
        return lineage.sample_audit().manifest() is not None
    except MissingInput:  # the samples are not all there
        return False


def expected_fits(lineage: Lineage) -> tuple[Fit, Fit]:
    """Whether the states will fit if completions are short, and if they are long.

    Raises MissingInput without a target.
    """
    longest = lineage.recipe.generation.max_completion_tokens
    known = known_lengths(lineage)
    short, long = (
        expected_plan(lineage, known, [(0, max(int(longest * share), 1))] * lineage.recipe.prompts.per_shard)
        for share in (_SHORT, _LONG)
    )
    return Fit.of(lineage, short), Fit.of(lineage, long)


def known_lengths(lineage: Lineage) -> dict[str, list[tuple[int, int]]]:
    """Tokens of (prompt, prompt + completion) of the samples that train, of each shard that is made."""
    train_truncated = lineage.recipe.generation.train_truncated
    known = {}
    for shard in lineage.recipe.shards:
        try:
            place = lineage.synthetic_samples(shard)
        except MissingInput:  # no prompts yet
            return {}
        if place.manifest() is not None:
            known[shard] = trained_lengths(place.folder / SAMPLES_NAME, train_truncated)
    return known


def expected_plan(
    lineage: Lineage, known: dict[str, list[tuple[int, int]]], expected: list[tuple[int, int]]
) -> BytePlan:
    """The byte plan before all samples are made: each other shard is taken to have the lengths `expected`.

    Raises MissingInput without a target.
    """
    shards = [shard_lengths(lineage, one, known.get(one, expected)) for one in lineage.recipe.shards]
    return byte_plan(lineage, shards)


def memory_wanted(recipe: Recipe, model_bytes: int) -> int:
    """Bytes of memory that a server of this recipe takes on the CPU."""
    return model_bytes + int(_cache_gib(recipe) * 2**30) + _SERVER_OVERHEAD_BYTES


def _cache_gib(recipe: Recipe) -> float:
    return max(recipe.server.phase(phase).cpu_kv_cache_gib or 4 for phase in ("generation", "evaluation"))


def _require_memory(recipe: Recipe, model_bytes: int) -> None:
    cache, wanted = _cache_gib(recipe), memory_wanted(recipe, model_bytes)
    available = available_bytes()
    if available < wanted:
        raise NotEnoughRoom(
            f"a vLLM server for this recipe takes about {wanted / 2**30:.1f} GiB of memory (weights "
            f"{model_bytes / 2**30:.1f}, KV cache {cache:.1f}), {available / 2**30:.1f} GiB are available. "
            "Stop other programs, or lower server.common.cpu_kv_cache_gib."
        )
