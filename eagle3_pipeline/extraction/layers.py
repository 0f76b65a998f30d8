"""Which hidden state a layer id means. The convention is written here once; nobody else converts.

    embedding ── [layer 0] ── [layer 1] ── ... ── [layer N-1] ── final norm ── head
              0            1            2                      N

Id k is what enters layer k: Hugging Face `hidden_states[k]`, vLLM's
`eagle_aux_hidden_state_layer_ids`, the recipe's `extraction.layers`. Id N = the number of layers is
what leaves the last layer *before* the final norm (Hugging Face's last entry is after it). SGLang
and SpecForge count the output of layer k: their k is our k + 1. A recipe may give theirs
(`layers_counted: output`); they are converted when it is read, and nowhere else.
"""

from collections.abc import Sequence

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.recipe.layers import require_rising

CONVENTION = "input-of-layer"
"""Name of the convention, as it stands in each shard's header."""


def check_layers(ids: Sequence[int], num_layers: int) -> None:
    """Raise RecipeError unless `ids` rise, leave out the embedding and end with `num_layers`.

    The last id is wanted because training compares the draft with what the target's final norm and
    head make of it. Some engines take an id that they do not have and capture nothing for it.
    """
    listed = list(ids)
    try:
        require_rising(listed)
    except ValueError as error:
        raise RecipeError(f"extraction.layers {error}") from error
    if listed[-1] > num_layers:
        raise RecipeError(
            f"extraction.layers {listed}: id {listed[-1]} is more than the target's {num_layers} layers. "
            f"Id k is what enters layer k; {num_layers} is the last layer's output before the final norm."
        )
    if listed[-1] != num_layers:
        raise RecipeError(
            f"extraction.layers {listed} lacks {num_layers}, the last layer's output before the final norm, "
            "which training needs. Ids of outputs of layers (SGLang, SpecForge) must be raised by one. "
            f"Use {[*listed, num_layers]}."
        )
