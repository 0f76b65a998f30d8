"""The draft's norms that are there or not: four flags of its config, the same in speculators and vLLM.

    norm_before_residual   what the layer adds to is the state after its norm, not before it
    norm_before_fc         one norm over the joined states of the target's layers
    fc_norm                a norm for the state of each of these layers (EAGLE-3.1)
    norm_output            the output is fed back normed (EAGLE-3.1)

The EAGLE-3 authors' draft has none of them.
"""

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def new_norms(*, per_layer_norm: bool, norm_output: bool, norm_before_residual: bool) -> dict[str, bool]:
    """Norm flags of a new draft.

    The states of middle layers can be twenty times as large as those of the first ones (SmolLM2: 60 to 3)
    and as what a new layer adds: unnormed, they drown both.
    """
    return {
        "norm_before_residual": norm_before_residual,
        "fc_norm": per_layer_norm,
        "norm_before_fc": False,
        "norm_output": norm_output,
    }
