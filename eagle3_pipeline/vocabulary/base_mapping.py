"""The vocabulary map of a pretrained draft: which token each row of its head means.

d2t as offsets (target = i + d2t[i]) is what the EAGLE-3 authors, SpecForge, speculators, SGLang and vLLM
write and read. Some tools write the target's ids themselves. Both are numbers, so a rule tells them apart:

    t2d is there       the reading whose tokens are exactly those of t2d, which has the target's size
    t2d is missing     ids, where d2t rises strictly and ends below the target's size: as offsets it would say
                       that no two neighbours of the target's vocabulary are both in the draft's, which no
                       count of real text gives. Offsets otherwise.

Ids are turned into offsets. What fits neither is refused: a wrong map proposes nonsense, in silence.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.model_folder import weight_files

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_WRAPPER = "model."


def read_base_mapping(base: Path, vocab_size: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """d2t int64 `[draft]` and t2d bool `[vocab_size]` of a pretrained draft; raises BadInput.

    The identity where its head has all tokens, or where it has no head of its own (the target's).
    """
    import torch

    maps, rows = _read(base)
    if "d2t" not in maps:
        if rows not in (None, vocab_size):
            raise BadInput(
                f"the base draft {base} has a head of {rows} tokens and no d2t, while the target has "
                f"{vocab_size}: which tokens it proposes is unknown. Take another base draft, or none."
            )
        return torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool)
    tokens = _tokens(base, maps["d2t"], maps.get("t2d"), vocab_size)
    if rows != len(tokens):
        raise BadInput(
            f"the base draft {base} has a d2t of {len(tokens)} tokens for a head of {rows or 'no'} rows: "
            "they do not belong together. Take another base draft, or none."
        )
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[tokens] = True
    return tokens - torch.arange(len(tokens)), t2d


def _read(base: Path) -> "tuple[dict[str, torch.Tensor], int | None]":
    """d2t and t2d, as far as they are there, and the rows of the head; None where it has none."""
    from safetensors import safe_open

    maps: dict[str, torch.Tensor] = {}
    rows: int | None = None
    for file in weight_files(base):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dict
                bare = name.removeprefix(_WRAPPER)
                if bare in ("d2t", "t2d"):
                    maps[bare] = weights.get_tensor(name)
                elif bare == "lm_head.weight":
                    rows = weights.get_slice(name).get_shape()[0]
    return maps, rows


def _tokens(base: Path, d2t: "torch.Tensor", t2d: "torch.Tensor | None", vocab_size: int) -> "torch.Tensor":
    """The target's id of each draft token, int64 `[draft]`, strictly rising."""
    import torch

    if d2t.dtype.is_floating_point or d2t.dim() != 1 or not len(d2t):
        raise BadInput(
            f"the base draft {base} has a d2t of {d2t.dtype} {list(d2t.shape)}, expected whole numbers "
            "[draft]. Take another base draft, or none."
        )
    ids = d2t.to(torch.int64)
    offsets = ids + torch.arange(len(ids))
    if t2d is None:
        found = ids if _is_map(ids, vocab_size) and len(ids) > 1 else offsets
        fits = _is_map(found, vocab_size)
        wanted = f"ids that rise strictly, from 0 to {vocab_size - 1}"
    elif t2d.numel() != vocab_size:
        raise BadInput(
            f"the base draft {base} has a t2d of {t2d.numel()} tokens, expected the target's {vocab_size}. "
            "It is a draft of another target: take another base draft, or none."
        )
    else:
        true = t2d.flatten().bool().nonzero().flatten()
        found = ids if torch.equal(ids, true) else offsets
        fits = torch.equal(found, true) and _is_map(found, vocab_size)
        wanted = f"those {len(true)} of its t2d, all below {vocab_size}"
    if not fits:
        raise BadInput(
            f"the base draft {base} has a d2t that leads, as offsets, to the target's tokens "
            f"{int(offsets.min())} to {int(offsets.max())}, expected {wanted}. It is a draft of another "
            "target, or damaged: take another base draft, or none."
        )
    if found is ids:
        logger.info("the d2t of %s holds the target's ids, not offsets: turned into offsets", base)
    return found


def _is_map(tokens: "torch.Tensor", vocab_size: int) -> bool:
    return bool((tokens.diff() > 0).all()) and int(tokens[0]) >= 0 and int(tokens[-1]) < vocab_size
