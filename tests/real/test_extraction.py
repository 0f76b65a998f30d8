"""What the extraction server captures is what a Hugging Face forward computes, however it is batched."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.serving.server import open_server, stop_servers
from eagle3_pipeline.serving.specification import extraction_server
from eagle3_pipeline.shards.reader import ShardReader
from tests.extraction.build import audit, invent, make_lineage

CHUNK = 256  # tokens in one prefill step of the server: the longest samples take several


def _reference(folder: Path, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """float32 states [tokens, layers, hidden] in the project's convention, by transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, arguments: before_norm.append(arguments[0]))
    with torch.no_grad():
        states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    last = model.config.num_hidden_layers
    return torch.stack([before_norm[0][0] if layer == last else states[layer][0] for layer in layers], dim=1)


@pytest.mark.real
def test_captured_states_are_those_of_a_hugging_face_forward(tmp_path: Path, tiny_llama: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    last, hidden = config["num_hidden_layers"], config["hidden_size"]
    layers = (1, 2, last)
    random.seed(0)
    lengths = [5, 17, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7, *(20 + 9 * number for number in range(34))]
    samples = [
        invent(0, number, completion_token_ids=[random.randrange(20, 500) for _ in range(length)])
        for number, length in enumerate(lengths)
    ]
    lineage = audit(
        make_lineage(
            tmp_path,
            [samples],
            facts={"model_path": str(tiny_llama), "num_layers": last, "hidden_size": hidden},
            server={
                "max_model_len": 2048,
                "enforce_eager": True,
                "gpu_memory_utilization": 0.3,
                "cpu_kv_cache_gib": 1,
                "max_num_seqs": 32,
                "extra_args": ["--max-num-batched-tokens", str(CHUNK)],
            },
            layers=layers,
            concurrency=32,
            max_sample_tokens=2000,
        )
    )
    try:
        server = open_server(extraction_server(lineage, lineage.staging), lineage.logs)
        (manifest,) = extract_shards(lineage, lineage.recipe.shards, server, lambda shard, made: None)
    finally:
        stop_servers(())
    assert manifest.facts["quarantined"] == {}
    reader = ShardReader([lineage.hidden_state_shards(lineage.recipe.shards[0]).folder])
    assert reader.sample_ids == [sample.sample_id for sample in samples]
    for index, sample in enumerate(samples[:8]):
        found = reader[index]
        assert found["token_ids"].tolist() == sample.token_ids
        expected = _reference(tiny_llama, sample.token_ids, layers)
        cosine = torch.cosine_similarity(found["hidden_states"].float(), expected, dim=-1)
        assert cosine.mean(dim=0).min() > 0.999, (sample.sample_id, cosine.mean(dim=0))


class _Copied:
    def synchronize(self) -> None:
        return None


@pytest.mark.real
@pytest.mark.parametrize(
    ("said", "mark"),
    [
        ("Error while serializing: I/O error: No space left on device (os error 28)", ".no-room"),
        ("Error while serializing: I/O error: Input/output error (os error 5)", ".failed"),
    ],
)
def test_a_failed_write_leaves_a_mark_and_no_file(
    said: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as of_vllm

    from eagle3_pipeline.extraction.connector import HiddenStatesConnector

    def fail(tensors: dict[str, torch.Tensor], path: str) -> None:
        Path(path).write_bytes(b"half")
        raise SafetensorError(said)

    path = tmp_path / "cmpl-1-0.safetensors"
    tensors = {"hidden_states": torch.ones(2, 1, 4), "token_ids": torch.ones(2)}
    with monkeypatch.context() as patched:
        patched.setattr(of_vllm, "save_file", fail)
        with pytest.raises(SafetensorError):
            HiddenStatesConnector._write_tensors(tensors, _Copied(), str(path), None)
    assert [found.name for found in tmp_path.iterdir()] == [path.name + mark]
    HiddenStatesConnector._write_tensors(tensors, _Copied(), str(path), None)
    assert path.exists()
    assert not list(tmp_path.glob(".*"))
