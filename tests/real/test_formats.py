"""The real vLLM on both layouts of a release: the same draft, and so the same counts."""

import json
from pathlib import Path

import pytest

from eagle3_pipeline.evaluation.measurement import Measurement, measure
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts.evaluation import read_set
from eagle3_pipeline.serving.server import open_server
from eagle3_pipeline.serving.specification import evaluation_server
from tests.drafts import make_draft

pytestmark = pytest.mark.real

_LAYERS = (2, 3, 4)


def plain_base(folder: Path, target: Path) -> Path:
    """A draft of the authors' kind: no norms of its own, four of five tokens, and states that matter."""
    import torch
    from safetensors.torch import load_file, save_file

    made = make_draft(folder / "with-norm", target, layers=_LAYERS)
    tensors = load_file(made / "model.safetensors")
    kept = torch.tensor([token for token in range(len(tensors["lm_head.weight"])) if token % 5])
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept]
    tensors["fc.weight"] = tensors["fc.weight"] * 1.5  # added to the state as it is: some proposals follow it
    tensors["d2t"] = kept - torch.arange(len(kept))
    (folder / "base").mkdir()
    save_file(tensors, folder / "base" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    config |= {"norm_before_residual": False, "draft_vocab_size": len(kept)}
    (folder / "base" / "config.json").write_text(json.dumps(config))
    return folder / "base"


def both_layouts(folder: Path, target: Path) -> tuple[Path, Path]:
    """The draft as training exports it when it goes on from that base, and as it is released beside that."""
    from eagle3_pipeline.release.eagle3_layout import write_eagle3_layout
    from eagle3_pipeline.target_weights import read_target_weights
    from eagle3_pipeline.training.draft import new_draft, speculator_config
    from eagle3_pipeline.training.export import export_draft
    from eagle3_pipeline.training.warm_start import load_base, read_base_config
    from eagle3_pipeline.vocabulary.base_mapping import read_base_mapping

    base, weights = plain_base(folder, target), read_target_weights(target)
    d2t, t2d = read_base_mapping(base, len(weights.embedding))
    layer, norms = read_base_config(base, weights, _LAYERS)
    config = speculator_config(
        layer,
        weights,
        target_name=target.name,
        aux_layers=_LAYERS,
        draft_tokens=len(d2t),
        speculative_tokens=3,
        norms=norms,
    )
    model = new_draft(config, weights, d2t, t2d, seed=0, train_head=True)
    load_base(model, base)
    export_draft(model, folder / "draft", _LAYERS)
    files = write_eagle3_layout(folder / "draft", target, folder / "eagle3", target.name)
    assert not isinstance(files, str), files
    return folder / "draft", folder / "eagle3"


def measured(lineage: Lineage, draft: Path, logs: Path) -> Measurement:
    settings = lineage.recipe.evaluation
    with open_server(evaluation_server(lineage, draft), logs, stop=True) as server:
        return measure(
            server,
            read_set(settings.sets[0]),
            settings,
            name=draft.name,
            with_draft=True,
            request_timeout_s=60,
        )


def test_vllm_accepts_as_many_tokens_of_a_draft_in_either_layout(
    real_lineage: Lineage, tiny_llama: Path, tmp_path: Path
) -> None:
    ours, authors = (
        measured(real_lineage, folder, tmp_path) for folder in both_layouts(tmp_path, tiny_llama)
    )
    assert ours.acceptance is not None
    assert ours.acceptance == authors.acceptance
    assert ours.replies == authors.replies
    share = ours.acceptance.accepted_per_position[0] / ours.acceptance.drafts
    print(f"\n{ours.acceptance}")
    assert 0.1 < share < 0.9  # neither by chance nor whatever the states are
