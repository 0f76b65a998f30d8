"""A training from a base draft: from what lies on the disk to the draft, or to the word that it is no use."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from safetensors.torch import load_file

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.training import loop
from eagle3_pipeline.training.training import train_draft
from eagle3_pipeline.training.validation import Judgement
from tests.drafts import make_draft
from tests.training.world import in_this_process, make_lineage, write_states


@pytest.fixture
def lineage(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Lineage:
    """States are random, so the draft, which is right about the target itself, knows nothing here."""
    make_draft(tmp_path / "draft", tiny_llama)
    in_this_process(monkeypatch)
    layers = {"layers": [1, 2, 3, 4]}
    made = make_lineage(tmp_path, tiny_llama, base_draft={"path": str(tmp_path / "draft")}, extraction=layers)
    write_states(made, list(made.recipe.shards))
    return made


def test_a_base_draft_that_is_worthless_here_ends_the_training_before_its_first_step(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    worse = Judgement(9.0, (0.0,) * 3, (0.0,) * 3, 1.0, 1000, 0.1, acceptance_by_tokens=(1.0,) * 3)
    monkeypatch.setattr(loop, "judge", lambda *_: worse)
    with pytest.raises(BadInput, match="of the held-out tokens rightly before its first step"):
        train_draft(lineage, nullcontext())
    assert lineage.draft_checkpoint().manifest() is None


def test_a_base_draft_is_trained_on_or_given_back_as_it_came(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "require_above_chance", lambda _: None)
    made = train_draft(lineage, nullcontext())
    assert isinstance(made, Manifest)
    assert made.facts["warm_start"] is True
    base = load_file(lineage.base_draft_path() / "model.safetensors")
    draft = load_file(lineage.draft_checkpoint().folder / "draft" / "model.safetensors")
    same = bool((draft["fc.weight"] == base["fc.weight"]).all())
    assert same == (made.facts["best_step"] == 0)
