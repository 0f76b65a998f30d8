"""The tiny Llama with its recipe, for tests that start the real vLLM; its servers are stopped at the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.serving.server import stop_servers
from eagle3_pipeline.target import make_target
from tests.recipes import tiny_recipe


@pytest.fixture(scope="session")
def real_recipe(real_state: Path, tiny_llama: Path) -> Path:
    """The recipe's file."""
    return tiny_recipe(
        real_state / "recipe",
        tiny_llama,
        prompts={"count": 16},
        generation={"temperature": 0.0, "max_completion_tokens": 200},
        evaluation={"max_completion_tokens": 100},
    )


@pytest.fixture(scope="session")
def real_lineage(real_state: Path, real_recipe: Path) -> Iterator[Lineage]:
    """Recipe and storage shared by these tests, with the target made: the same servers serve all of them."""
    lineage = Lineage(load_recipe(str(real_recipe), real_recipe.parent), real_state / "storage")
    make_target(lineage)
    yield lineage
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_HOST_STATE", str(real_state / "host"))
        stop_servers(())
