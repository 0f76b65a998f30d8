"""The base of all settings: unknown keys are refused, nothing is converted silently or changed later."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Settings that refuse unknown keys and wrong types, and are frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
