"""Whether a recipe fits this machine, asked before anything long starts.

Lengths of completions are unknown then, so disk is judged by two bounds: a run whose states do not
fit even if completions are short is refused, one that fits only then is warned about. `sample_audit`
knows the real lengths and decides for good.
"""

import logging
import shutil
from typing import Any

import psutil

from eagle3_pipeline.durable_files import require_free_bytes
from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe

logger = logging.getLogger(__name__)

_BYTES_PER_VALUE = 2  # bfloat16
_SHORT, _LONG = 0.1, 0.5  # mean completion as a share of max_completion_tokens
# What one vLLM process on the CPU takes beside weights and KV cache: libraries, compiled code,
# activations. Measured on SmolLM2: 2.1 GiB.
_SERVER_OVERHEAD_BYTES = int(2.5 * 2**30)


def bytes_per_token(recipe: Recipe, hidden_size: int) -> int:
    """Bytes of the states of one token: layers x hidden x 2."""
    return len(recipe.extraction.layers) * hidden_size * _BYTES_PER_VALUE


def require_room(lineage: Lineage, target: dict[str, Any]) -> None:
    """Raise NotEnoughRoom if memory or disk cannot do for the recipe; `target` are the target's facts."""
    recipe = lineage.recipe
    if not recipe.partitions.generation:
        _require_memory(recipe, int(target["bytes"]))
    samples = len(recipe.shards) * recipe.prompts.per_shard
    per_sample = recipe.generation.max_completion_tokens * bytes_per_token(recipe, int(target["hidden_size"]))
    lineage.folder.mkdir(parents=True, exist_ok=True)
    require_free_bytes(
        lineage.folder,
        int(samples * per_sample * _SHORT),
        f"the hidden states of {samples} samples, even at a mean of "
        f"{recipe.generation.max_completion_tokens * _SHORT:.0f} completion tokens,",
    )
    free, wanted = shutil.disk_usage(lineage.folder).free, samples * per_sample * _LONG
    if free < wanted:
        logger.warning(
            "the hidden states may not fit: %.1f GiB are free, completions of %.0f tokens would take %.1f "
            "GiB. sample_audit decides when the lengths are known.",
            free / 2**30,
            recipe.generation.max_completion_tokens * _LONG,
            wanted / 2**30,
        )


def _require_memory(recipe: Recipe, model_bytes: int) -> None:
    cache = max(recipe.server.phase(phase).cpu_kv_cache_gib or 4 for phase in ("generation", "evaluation"))
    wanted = model_bytes + int(cache * 2**30) + _SERVER_OVERHEAD_BYTES
    available = psutil.virtual_memory().available
    if available < wanted:
        raise NotEnoughRoom(
            f"a vLLM server for this recipe takes about {wanted / 2**30:.1f} GiB of memory (weights "
            f"{model_bytes / 2**30:.1f}, KV cache {cache:.1f}), {available / 2**30:.1f} GiB are available. "
            "Stop other programs, or lower server.common.cpu_kv_cache_gib."
        )
