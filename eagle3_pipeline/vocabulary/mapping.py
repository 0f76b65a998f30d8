"""The map between the draft's vocabulary and the target's, as vLLM and speculators read it.

    d2t  int64 [draft]   offsets: draft token i is the target's token i + d2t[i]
    t2d  bool  [target]  True for each token of the target that the draft has

Example: the draft has the tokens 0, 2 and 5 of a target with 6:

    i              0   1   2
    d2t            0   1   3
    i + d2t[i]     0   2   5        strictly rising, below 6
    t2d            1 0 1 0 0 1

On disk: vocabulary.safetensors with both.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.vocabulary.base_mapping import read_base_mapping
from eagle3_pipeline.vocabulary.ceiling import ceiling, compare_sizes
from eagle3_pipeline.vocabulary.counts import Replies, read_replies
from eagle3_pipeline.vocabulary.kinds import token_kinds
from eagle3_pipeline.vocabulary.selection import build_mapping

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

VOCABULARY_NAME = "vocabulary.safetensors"


def make_vocabulary(lineage: Lineage) -> Manifest:
    """Choose the draft's tokens, or keep the base draft's; raises BadInput, DamagedFile and MissingInput."""
    place = lineage.vocabulary_map()
    if (found := place.manifest()) is not None:
        return found
    size = int(lineage.target_model().require().facts["vocab_size"])
    replies = read_replies(lineage)
    kinds = token_kinds(lineage.model_path(), replies.counts, size)
    always = [token for ids in kinds.values() for token in ids]
    if (base := lineage.base_draft_path()) is not None:
        d2t, t2d = read_base_mapping(base, size)
        logger.info("kept the base draft's vocabulary of %s tokens", f"{len(d2t):,}")
    else:
        d2t, t2d = build_mapping(replies.counts, lineage.recipe.vocabulary.draft_tokens, size, always)
    verify_mapping(d2t, t2d, size)
    place.folder.mkdir(parents=True, exist_ok=True)
    path = place.folder / VOCABULARY_NAME
    write_mapping(path, d2t, t2d)
    facts = {
        "draft_tokens": len(d2t),
        "distinct_tokens": len(replies.counts),
        "coverage": coverage(t2d, replies.counts),
        "from_base_draft": lineage.recipe.base_draft is not None,
        "always_in": {kind: int(t2d[ids].sum()) for kind, ids in kinds.items()},
        "always_left_out": len(always) - int(t2d[always].sum()),
        **_ceilings(replies, t2d, always, lineage.recipe.evaluation.speculative_tokens),
    }
    logger.info(
        "vocabulary: %s of %s distinct tokens cover %.2f %% of the completions",
        f"{len(d2t):,}",
        f"{len(replies.counts):,}",
        100 * facts["coverage"],
    )
    return place.finish([path], facts)


def _ceilings(
    replies: Replies, t2d: "torch.Tensor", always: Sequence[int], speculative_tokens: int
) -> dict[str, Any]:
    """What this map and others could reach at best on the replies that judge, where there are any."""
    if not replies.held_out:
        return {}
    best = ceiling(replies.held_out, t2d, speculative_tokens)
    return {
        "held_out_tokens": best.tokens,
        "held_out_coverage": best.coverage,
        "best_acceptance_length": best.acceptance_length,
        "speculative_tokens": speculative_tokens,
        "sizes": compare_sizes(replies.counts, always, replies.held_out, t2d, speculative_tokens),
    }


def verify_mapping(d2t: "torch.Tensor", t2d: "torch.Tensor", vocab_size: int) -> None:
    """Check both directions against each other; raises DamagedFile with the first contradiction."""
    import torch

    targets = d2t.to(torch.int64) + torch.arange(len(d2t))
    problem = None
    if t2d.shape != (vocab_size,) or t2d.dtype != torch.bool:
        problem = f"t2d is {t2d.dtype} {list(t2d.shape)}, expected bool [{vocab_size}]"
    elif not len(targets) or int(targets[0]) < 0 or int(targets[-1]) >= vocab_size:
        problem = f"d2t leads outside of the target's {vocab_size} tokens"
    elif bool((targets.diff() <= 0).any()):
        at = int((targets.diff() <= 0).nonzero()[0])
        problem = (
            f"d2t leads to token {int(targets[at])} and then to {int(targets[at + 1])}, which is not above it"
        )
    elif not torch.equal(t2d.nonzero().flatten(), targets):
        problem = f"t2d has {int(t2d.sum())} tokens that are not the {len(targets)} of d2t"
    if problem:
        raise DamagedFile(
            f"the vocabulary map contradicts itself: {problem} (d2t holds offsets: target = i + d2t[i])"
        )


def coverage(t2d: "torch.Tensor", counts: Counter[int]) -> float:
    """Share of the completions' tokens that the draft can propose at all."""
    kept = set(t2d.nonzero().flatten().tolist())
    total = counts.total()
    return sum(count for token, count in counts.items() if token in kept) / total if total else 0.0


def write_mapping(path: Path, d2t: "torch.Tensor", t2d: "torch.Tensor") -> None:
    """Write the map as safetensors."""
    from eagle3_pipeline.tensor_file import write_tensors

    write_tensors({"d2t": d2t, "t2d": t2d}, path)


def read_mapping(path: Path) -> "tuple[torch.Tensor, torch.Tensor]":
    """d2t and t2d of a vocabulary file, verified both ways; raises DamagedFile."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        d2t, t2d = tensors["d2t"], tensors["t2d"]
    except (OSError, SafetensorError, KeyError) as error:
        raise DamagedFile(
            f"{path} is no vocabulary map ({error}). Materialise vocabulary_map again."
        ) from error
    verify_mapping(d2t, t2d, len(t2d))
    return d2t, t2d
