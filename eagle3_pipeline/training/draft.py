"""The draft: speculators' Eagle3DraftModel for one target, its weights and what of it is trained.

    states [R, A * H] --fc--> [R, H] --layer 0, attention over [embedding, state]--> [R, H]
        --norm, lm_head--> logits [R, draft]

Embedding, verifier head and verifier norm are the target's and frozen; they stay in the target's dtype.
Everything that is trained is float32.
"""

import logging
from typing import Any

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.target_weights import TargetWeights
from eagle3_pipeline.training.norms import NORM_FLAGS
from eagle3_pipeline.training.rope import rope_parameters

logger = logging.getLogger(__name__)

# Decoder layers that both speculators and vLLM know as an EAGLE-3 draft.
_LAYER_CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# Of a target with another attention (MLA) the draft takes heads of this width; dense models since Llama 2
# have it.
_HEAD_DIM = 128
_QUERIES_PER_KEY = 8
# speculators' resolve_draft_intermediate_size: a dense draft of a target that has only routed experts.
_MLP_RATIO = 3
# Random states under the target's own final norm are certain of wrong tokens: for SmolLM2 the loss of a
# step starts at 14.1, with half of the norm at 8.4; chance is 6.6.
_NORM_SHARE = 0.5
FROZEN = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def layer_config(
    target: dict[str, Any],
    aux_layers: int,
    *,
    intermediate_size: int | None = None,
    attention_window: int | None = None,
) -> PretrainedConfig:
    """Shape of the draft's decoder layer, from the target's own config (as a dict).

    `intermediate_size` is the target's where it is None; in a window of `attention_window` positions a
    token sees itself and those before it.
    """
    kind = target.get("model_type") if target.get("model_type") in _LAYER_CONFIGS else "llama"
    hidden = int(target["hidden_size"])
    heads = int(target["num_attention_heads"])
    same_attention = target.get("model_type") in _LAYER_CONFIGS
    if same_attention:
        head_dim = int(target.get("head_dim") or hidden // heads)
        key_heads = int(target.get("num_key_value_heads") or heads)
    else:
        head_dim = _HEAD_DIM if hidden % _HEAD_DIM == 0 else hidden // heads
        heads = hidden // head_dim
        key_heads = heads // _QUERIES_PER_KEY if heads % _QUERIES_PER_KEY == 0 else heads
    return _LAYER_CONFIGS[str(kind)](
        vocab_size=target["vocab_size"],
        hidden_size=hidden,
        intermediate_size=intermediate_size or int(target.get("intermediate_size") or _MLP_RATIO * hidden),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        hidden_act=target.get("hidden_act") or "silu",
        max_position_embeddings=target.get("max_position_embeddings", 2048),
        initializer_range=target.get("initializer_range", 0.02),
        rms_norm_eps=target.get("rms_norm_eps", 1e-6),
        rope_parameters=rope_parameters(target),
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=target.get("bos_token_id"),
        eos_token_id=target.get("eos_token_id"),
        # vLLM sizes the draft's fc by it; without, it takes 3.
        num_aux_hidden_states=aux_layers,
        dtype="bfloat16",
        **_window_settings(str(kind), attention_window),
    )


def _window_settings(kind: str, window: int | None) -> dict[str, Any]:
    """A window as speculators and vLLM read it: by the type of the draft's only layer."""
    if window is None:
        return {}
    settings = {"sliding_window": window, "layer_types": ["sliding_attention"]}
    # Qwen3's config forgets the window without it.
    return settings | ({"use_sliding_window": True} if kind == "qwen3" else {})


def attention_window(layer: PretrainedConfig) -> int | None:
    """Positions that a token of the draft sees, itself among them; None where it sees all before it."""
    types = getattr(layer, "layer_types", None) or ["full_attention"]
    return int(layer.sliding_window) if types[0] == "sliding_attention" else None


def speculator_config(
    layer: PretrainedConfig,
    weights: TargetWeights,
    *,
    target_name: str,
    aux_layers: tuple[int, ...],
    draft_tokens: int,
    speculative_tokens: int,
    norms: dict[str, bool] | None = None,
) -> Eagle3SpeculatorConfig:
    """The config that speculators and vLLM read; all norm flags explicit, False unless `norms` says else.

    Raises BadInput at a window that the speculated tokens alone would fill.
    """
    window = attention_window(layer)
    if window is not None and window <= speculative_tokens:
        raise BadInput(
            f"the draft looks back {window} tokens and speculates {speculative_tokens}: it would see nothing "
            "else. Set training.attention_window well above training.test_time_steps, or leave it out."
        )
    flags = dict.fromkeys(NORM_FLAGS, False)
    layer._attn_implementation = "sdpa"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_tokens,
        target_hidden_size=int(weights.config["hidden_size"]),
        eagle_aux_hidden_state_layer_ids=list(aux_layers),
        embed_requires_grad=False,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=speculative_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=target_name, architectures=list(weights.architectures)),
        ),
        **flags | (norms or {}),
    )


def new_draft(
    config: Eagle3SpeculatorConfig,
    weights: TargetWeights,
    d2t: Tensor,
    t2d: Tensor,
    *,
    seed: int,
    train_head: bool,
) -> Eagle3DraftModel:
    """A draft with random weights by `seed` and all that comes from the target; raises BadInput.

    Its head starts as the target's rows of the draft's tokens, its final norm as half of the target's.
    """
    layer = config.transformer_layer_config
    if (layer.vocab_size, layer.hidden_size) != tuple(weights.embedding.shape):
        raise BadInput(
            f"a draft of {layer.vocab_size} tokens and hidden size {layer.hidden_size} for a target of "
            f"{list(weights.embedding.shape)}: the draft is of another target"
        )
    torch.manual_seed(seed)
    model = Eagle3DraftModel(config)
    model.load_vocab_mappings(t2d, d2t)
    rows = weights.head[t2d] if model.use_draft_vocab else weights.head
    with torch.no_grad():
        model.embed_tokens.weight = torch.nn.Parameter(weights.embedding, requires_grad=False)
        model.verifier_lm_head.weight = torch.nn.Parameter(rows.clone(), requires_grad=False)
        model.verifier_norm.weight = torch.nn.Parameter(weights.norm.float(), requires_grad=False)
        model.lm_head.weight.copy_(rows)
        model.norm.weight.copy_(weights.norm * _NORM_SHARE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in FROZEN and (train_head or name != "lm_head.weight"))
    return model


def trained_parameters(model: Eagle3DraftModel) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}
