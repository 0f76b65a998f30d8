"""What a trained draft has to be: from the recipe, the target, the base draft, and what it was made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_pipeline.alternatives import chosen
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.model_folder import language_part, read_config
from eagle3_pipeline.recipe.training import Training
from eagle3_pipeline.release.names import target_name
from eagle3_pipeline.training.base_config import attention_of, layer_of, norm_flags
from eagle3_pipeline.training.base_config import read_config as read_draft_config
from eagle3_pipeline.training.norms import new_norms
from eagle3_pipeline.training.rope import rope_parameters

KINDS = ("llama", "qwen3")
"""The decoder layers that vLLM 0.32 takes for a speculators EAGLE-3 draft."""
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Of the layer's settings, those that no tensor's shape shows. A new draft has its target's heads only where
# it has the target's attention.
_UNSEEN = ("rms_norm_eps", "hidden_act", "max_position_embeddings")
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the draft was trained for."""

    hidden_size: int
    """Of the target."""
    vocab_size: int
    """Of the target."""
    architecture: str
    """Of the target."""
    verifier: str
    """Name under which the config has to speak of the target."""
    special_ids: Mapping[str, Any]
    """SPECIAL_IDS as the target's config has them; None where it does not say."""
    aux_layers: tuple[int, ...]
    """Layer ids of the states that feed the draft."""
    draft_tokens: int
    norms: Mapping[str, bool]
    """The norm flags it was trained with."""
    window: int | None
    """Positions that a token of the draft sees; None where it sees all before it."""
    layer: Mapping[str, Any]
    """Settings of its layer that no tensor shows, as far as the layer that it was made after has them."""
    rope: Mapping[str, Any]
    """Its rotary settings, as transformers 5 writes them."""
    target: Path
    """Folder of the target: the embedding is the target's, unless a base draft has its own."""
    base: Path | None = None
    """Folder of the base draft."""
    head_is_trained: bool = True

    @classmethod
    def of(cls, lineage: Lineage) -> "Expected":
        """What a draft of this lineage has to be; raises MissingInput and BadInput."""
        facts = lineage.target_model().require().facts
        trained = chosen(lineage)
        training = trained.recipe.training
        folder, base = lineage.model_path(), lineage.base_draft_path()
        target = language_part(read_config(folder))
        return cls(
            hidden_size=facts["hidden_size"],
            vocab_size=facts["vocab_size"],
            architecture=facts["architecture"],
            verifier=target_name(lineage.recipe.target),
            special_ids={name: target.get(name) for name in SPECIAL_IDS},
            aux_layers=lineage.recipe.extraction.layers[:-1],
            draft_tokens=trained.vocabulary_map().require().facts["draft_tokens"],
            target=folder,
            base=base,
            head_is_trained=training.train_head and training.rates.head > 0,
            **(_of_new(target, training) if base is None else _of_base(base)),
        )


def _of_new(target: Mapping[str, Any], training: Training) -> dict[str, Any]:
    same_attention = target.get("model_type") in KINDS
    return {
        "norms": new_norms(
            per_layer_norm=training.per_layer_norm,
            norm_output=training.norm_output,
            norm_before_residual=training.norm_before_residual,
        ),
        "window": training.attention_window,
        "layer": _named(target, (*_UNSEEN, *(_HEADS if same_attention else ()))),
        "rope": rope_parameters(target),
    }


def _of_base(base: Path) -> dict[str, Any]:
    config = read_draft_config(base)
    layer = layer_of(config)
    return {
        "norms": norm_flags(config),
        "window": attention_of(base, layer).get("sliding_window"),
        "layer": _named(layer, (*_UNSEEN, *_HEADS)),
        "rope": rope_parameters(layer),
    }


def _named(settings: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: settings[name] for name in names if settings.get(name) is not None}
