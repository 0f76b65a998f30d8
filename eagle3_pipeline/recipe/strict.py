"""The base of all settings: unknown keys are refused, nothing is converted silently or changed later."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
"""A share of a whole: from 0 to 1."""


HubId = Annotated[str, Field(pattern=r"^[\w.-]+(/[\w.-]+)?$")]
"""A model or a dataset of the Hugging Face Hub, such as `owner/name`."""


class Strict(BaseModel):
    """Settings that refuse unknown keys and wrong types, and are frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
