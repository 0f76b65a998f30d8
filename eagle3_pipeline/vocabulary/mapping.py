"""The map between the draft's vocabulary and the target's, as vLLM and speculators read it.

    d2t  int64 [draft]   offsets: draft token i is the target's token i + d2t[i]
    t2d  bool  [target]  True for each token of the target that the draft has

Example: the draft has the tokens 0, 2 and 5 of a target with 6:

    i              0   1   2
    d2t            0   1   3
    i + d2t[i]     0   2   5        strictly rising, below 6
    t2d            1 0 1 0 0 1

On disk: vocabulary.safetensors with d2t, t2d and `counts` int64 [target], the occurrences in the completions.
"""

import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_pipeline.errors import BadInput, DamagedFile, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.vocabulary.base_mapping import read_base_mapping
from eagle3_pipeline.vocabulary.counts import control_tokens, count_tokens

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

VOCABULARY_NAME = "vocabulary.safetensors"


def make_vocabulary(lineage: Lineage) -> Manifest:
    """Choose the draft's tokens, or keep the base draft's; raises BadInput, DamagedFile and RecipeError."""
    place = lineage.vocabulary_map()
    if (found := place.manifest()) is not None:
        return found
    target = lineage.target_model().require().facts
    size = int(target["vocab_size"])
    counts = count_tokens(lineage)
    if (base := lineage.base_draft_path()) is not None:
        d2t, t2d = read_base_mapping(base, size)
        logger.info("kept the base draft's vocabulary of %s tokens", f"{len(d2t):,}")
    else:
        always = control_tokens(lineage.model_path())
        d2t, t2d = build_mapping(counts, lineage.recipe.vocabulary.draft_tokens, size, always)
    verify_mapping(d2t, t2d, size)
    place.folder.mkdir(parents=True, exist_ok=True)
    path = place.folder / VOCABULARY_NAME
    write_mapping(path, d2t, t2d, counts)
    facts = {
        "draft_tokens": len(d2t),
        "distinct_tokens": len(counts),
        "coverage": coverage(t2d, counts),
        "from_base_draft": lineage.recipe.base_draft is not None,
    }
    logger.info(
        "vocabulary: %s of %s distinct tokens cover %.2f %% of the completions",
        f"{len(d2t):,}",
        f"{len(counts):,}",
        100 * facts["coverage"],
    )
    return place.finish([path], facts)


def build_mapping(
    counts: Counter[int], draft_tokens: int, vocab_size: int, always: frozenset[int] = frozenset()
) -> "tuple[torch.Tensor, torch.Tensor]":
    """d2t int64 [draft] and t2d bool [vocab_size] of the `draft_tokens` most frequent tokens.

    Ties go to the lower id; ids of `always` are in whatever their count; where the completions have
    too few distinct tokens, the lowest unused ids fill up (warned). Raises BadInput and RecipeError.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    known = {token for token in counts | Counter(always) if 0 <= token < vocab_size}
    if strange := sorted(set(counts) - known):
        raise BadInput(
            f"token ids {strange[:5]} in the completions, but the target has {vocab_size:,} tokens: they "
            "were made by another model. Make the samples again."
        )
    wanted = min(draft_tokens, vocab_size)
    if wanted < draft_tokens:
        logger.info(
            "vocabulary.draft_tokens %s is capped at the target's %s", f"{draft_tokens:,}", f"{vocab_size:,}"
        )
    kept_always = sorted(always & known)
    if len(kept_always) > wanted:
        raise RecipeError(
            f"vocabulary.draft_tokens is {draft_tokens}, but {len(kept_always)} control tokens are always "
            "in: raise it"
        )
    if len(known) < wanted:
        logger.warning(
            "the completions have %s distinct tokens, fewer than the draft's %s: %s tokens that never occur "
            "fill up. Lower vocabulary.draft_tokens or collect more samples.",
            f"{len(known):,}",
            f"{wanted:,}",
            f"{wanted - len(known):,}",
        )
    highest = max(counts.values(), default=0)
    ranked = {token: counts[token] + (highest + 1 if token in always else 0) for token in known}
    d2t, t2d = build_vocab_mappings_from_distribution(ranked, wanted, vocab_size)
    return d2t, t2d


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


def write_mapping(path: Path, d2t: "torch.Tensor", t2d: "torch.Tensor", counts: Counter[int]) -> None:
    """Write the map and the counts as safetensors."""
    import torch

    from eagle3_pipeline.tensor_file import write_tensors

    occurrences = torch.zeros(len(t2d), dtype=torch.int64)
    for token, count in counts.items():
        occurrences[token] = count
    write_tensors({"d2t": d2t, "t2d": t2d, "counts": occurrences}, path)


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
