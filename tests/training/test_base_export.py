"""The base draft as it is served beside the trained one: its own weights, laid out as a trained draft."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.training import export
from eagle3_pipeline.training.base_export import export_base
from eagle3_pipeline.training.base_tensors import renamed
from tests.drafts import make_draft
from tests.training.world import make_lineage


@pytest.fixture
def lineage(tmp_path: Path, tiny_llama: Path) -> Lineage:
    """A base draft in the EAGLE-3 authors' layout."""
    make_draft(tmp_path / "draft", tiny_llama)
    layers = {"layers": [1, 2, 3, 4]}
    return make_lineage(tmp_path, tiny_llama, base_draft={"path": str(tmp_path / "draft")}, extraction=layers)


def test_a_base_draft_is_exported_with_its_own_weights_and_all_that_a_server_must_know(
    lineage: Lineage, tmp_path: Path
) -> None:
    export_base(lineage, tmp_path / "served")
    before = load_file(tmp_path / "draft" / "model.safetensors")
    after = load_file(tmp_path / "served" / "model.safetensors")
    assert all(torch.equal(after[renamed(name)], tensor) for name, tensor in before.items())
    target = load_file(lineage.model_path() / "model.safetensors")
    assert torch.equal(after["embed_tokens.weight"], target["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["norm_before_residual"] is True
    assert config["draft_vocab_size"] == len(after["lm_head.weight"])


def test_one_that_is_there_stays_for_its_time_is_in_the_servers_fingerprint(
    lineage: Lineage, tmp_path: Path
) -> None:
    export_base(lineage, tmp_path / "served")
    before = [path.stat().st_mtime_ns for path in sorted((tmp_path / "served").iterdir())]
    export_base(lineage, tmp_path / "served")
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "served").iterdir())] == before


def test_an_export_that_is_killed_leaves_none_behind(
    lineage: Lineage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export, "_compare", killed)
        with pytest.raises(KeyboardInterrupt):
            export_base(lineage, tmp_path / "served")
    assert not (tmp_path / "served").exists()
    export_base(lineage, tmp_path / "served")
    assert not (tmp_path / ".served.tmp").exists()
