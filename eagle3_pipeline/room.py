"""Whether what a recipe still has to make fits this machine, asked before anything long starts.

Lengths of completions are unknown then, so room for states is judged by two bounds: a run whose states do not
fit even if completions are short is refused, one that fits only then is warned about. `sample_audit`
knows the real lengths and decides for good.
"""

import logging
from typing import Any

import psutil

from eagle3_pipeline.errors import MissingInput, NotEnoughRoom
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.samples.byte_plan import BytePlan, ShardLengths, byte_plan, shard_lengths
from eagle3_pipeline.samples.fitting import Fit, in_words
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


def expected_fits(lineage: Lineage) -> tuple[Fit, Fit]:
    """Whether the states will fit if completions are short, and if they are long.

    Raises MissingInput without a target.
    """
    short, long = (expected_plan(lineage, share) for share in (_SHORT, _LONG))
    return Fit.of(lineage, short), Fit.of(lineage, long)


def expected_plan(lineage: Lineage, mean: float) -> BytePlan:
    """The byte plan before all samples are made: the others get completions of this share of the longest.

    A shard that is made counts with its mean lengths. Raises MissingInput without a target.
    """
    recipe = lineage.recipe
    guess = (0, max(int(recipe.generation.max_completion_tokens * mean), 1))
    plan = recipe.prompts
    shards = []
    for shard in recipe.shards:
        if (made := _made(lineage, shard)) is None:
            shards.append(ShardLengths(shard, [guess] * plan.per_shard, is_extracted=False))
            continue
        count = max(int(made["samples"]), 1)
        prompt = int(made["prompt_tokens"]) // count
        total = prompt + -(-int(made["completion_tokens"]) // count)
        shards.append(shard_lengths(lineage, shard, [(prompt, total)] * count))
    return byte_plan(lineage, shards)


def _made(lineage: Lineage, shard: str) -> dict[str, Any] | None:
    try:
        return lineage.synthetic_samples(shard).require().facts
    except MissingInput:
        return None


def memory_wanted(recipe: Recipe, model_bytes: int) -> int:
    """Bytes of memory that a server of this recipe takes on the CPU."""
    return model_bytes + int(_cache_gib(recipe) * 2**30) + _SERVER_OVERHEAD_BYTES


def _cache_gib(recipe: Recipe) -> float:
    return max(recipe.server.phase(phase).cpu_kv_cache_gib or 4 for phase in ("generation", "evaluation"))


def _require_memory(recipe: Recipe, model_bytes: int) -> None:
    cache, wanted = _cache_gib(recipe), memory_wanted(recipe, model_bytes)
    available = psutil.virtual_memory().available
    if available < wanted:
        raise NotEnoughRoom(
            f"a vLLM server for this recipe takes about {wanted / 2**30:.1f} GiB of memory (weights "
            f"{model_bytes / 2**30:.1f}, KV cache {cache:.1f}), {available / 2**30:.1f} GiB are available. "
            "Stop other programs, or lower server.common.cpu_kv_cache_gib."
        )
