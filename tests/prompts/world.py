"""A recipe whose target is made, with prompts of the tests' own."""

import json
from pathlib import Path
from typing import Any

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from tests.recipes import distinct_prompts, tiny_recipe


def make_lineage(
    tmp_path: Path, model_folder: Path, rows: list[Any] | None = None, **prompts: Any
) -> Lineage:
    """A recipe with a target that is made; `rows` replace its 40 distinct prompts."""
    prompts = {"count": 16, **prompts}
    tmp_path.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe(str(tiny_recipe(tmp_path, model_folder, prompts=prompts)), tmp_path)
    rows = (
        [{"prompt": text, "kind": "tiny"} for text in distinct_prompts(40, seed=1)] if rows is None else rows
    )
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lineage = Lineage(recipe, tmp_path / "storage")
    place = lineage.target_model()
    if place.manifest() is None:
        place.folder.mkdir(parents=True)
        place.finish([], {"model_path": str(model_folder), "model_fingerprint": "m" * 64})
    return lineage
