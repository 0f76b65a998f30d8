"""Whether what a recipe still has to make fits this machine, asked before anything long starts.

Lengths of completions are unknown then, so disk is judged by two bounds: a run whose states do not
fit even if completions are short is refused, one that fits only then is warned about. `sample_audit`
knows the real lengths and decides for good.
"""

import logging
import shutil

import psutil

from eagle3_pipeline.durable_files import require_free_bytes
from eagle3_pipeline.errors import MissingInput, NotEnoughRoom
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.serving.server import running_servers
from eagle3_pipeline.shards.format import bytes_of_states

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
    lineage.folder.mkdir(parents=True, exist_ok=True)
    short, wanted = bytes_wanted(lineage)
    require_free_bytes(
        lineage.folder,
        short,
        "the hidden states of the samples that have none yet, even at a mean of "
        f"{recipe.generation.max_completion_tokens * _SHORT:.0f} completion tokens,",
        "Free some space, point EAGLE3_STORAGE to a larger disk, or lower prompts.count.",
    )
    free = shutil.disk_usage(lineage.folder).free
    if free < wanted:
        logger.warning(
            "the hidden states may not fit: %.1f GiB are free, completions of %.0f tokens would take %.1f "
            "GiB. sample_audit decides when the lengths are known.",
            free / 2**30,
            recipe.generation.max_completion_tokens * _LONG,
            wanted / 2**30,
        )


def bytes_wanted(lineage: Lineage) -> tuple[int, int]:
    """Bytes of the states still to be written, if completions are short and if they are long.

    Raises MissingInput without a target.
    """
    return _missing_bytes(lineage, _SHORT), _missing_bytes(lineage, _LONG)


def _missing_bytes(lineage: Lineage, mean: float) -> int:
    """Bytes of the states still to be written, if completions have this share of their longest length."""
    recipe = lineage.recipe
    hidden = int(lineage.target_model().require().facts["hidden_size"])
    tokens = int(recipe.prompts.per_shard * recipe.generation.max_completion_tokens * mean)

    def missing(tokens: int, there: int = 0) -> int:
        return max(bytes_of_states(tokens, len(recipe.extraction.layers), hidden) - there, 0)

    total = 0
    for shard in recipe.shards:
        try:
            samples = lineage.synthetic_samples(shard).require().facts
        except MissingInput:
            total += missing(tokens)
            continue
        states = lineage.hidden_state_shards(shard)
        if states.manifest() is None:
            known = int(samples["prompt_tokens"]) + int(samples["completion_tokens"])
            parts = sum(part.stat().st_size for part in states.folder.glob("part-*.safetensors"))
            total += missing(min(tokens, known), parts)
    return total


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
