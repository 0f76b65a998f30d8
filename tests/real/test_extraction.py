"""What the extraction server captures is what a Hugging Face forward computes, however it is batched."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe.generation import Generation
from eagle3_pipeline.samples.sample import Sample
from eagle3_pipeline.serving.server import open_server, stop_servers
from eagle3_pipeline.serving.specification import extraction_server
from eagle3_pipeline.shards.reader import ShardReader
from tests.extraction.build import audit, invent, make_lineage
from tests.models import make_deepseek

CHUNK = 256  # tokens in one prefill step of the server: the longest samples take several
MLA_LENGTHS = [10, 16, 60, 61, 62, 63, 300, 700]
SAID = 8  # tokens of each completion


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _talk(folder: Path, lengths: list[int]) -> list[Sample]:
    """Samples of these lengths, whose last SAID tokens the model said, so that its states mean something."""
    model, generator = _load(folder), torch.Generator().manual_seed(0)
    temperature = Generation.model_fields["temperature"].default
    samples = []
    for number, length in enumerate(lengths):
        prompt = torch.randint(20, 500, (length - SAID,), generator=generator).tolist()
        said: list[int] = []
        for _ in range(SAID):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + said])).logits[0, -1]
            chance = (logits / temperature).softmax(dim=0)
            said.append(int(torch.multinomial(chance, 1, generator=generator)))
        samples.append(invent(0, number, prompt_token_ids=prompt, completion_token_ids=said))
    return samples


def _reference(folder: Path, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """float32 states [tokens, layers, hidden] in the project's convention, by transformers."""
    model = _load(folder)
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, arguments: before_norm.append(arguments[0]))
    with torch.no_grad():
        states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    last = model.config.num_hidden_layers
    return torch.stack([before_norm[0][0] if layer == last else states[layer][0] for layer in layers], dim=1)


def _extract(tmp_path: Path, model: Path, lengths: list[int], **server: Any) -> tuple[Lineage, list[Sample]]:
    """Extract one shard of samples of these lengths (tokens in all) with layers 1, 2 and the last one."""
    config = json.loads((model / "config.json").read_text())
    last = config["num_hidden_layers"]
    samples = _talk(model, lengths)
    lineage = audit(
        make_lineage(
            tmp_path,
            [samples],
            facts={"model_path": str(model), "num_layers": last, "hidden_size": config["hidden_size"]},
            server={
                "max_model_len": 2048,
                "enforce_eager": True,
                "gpu_memory_utilization": 0.3,
                "cpu_kv_cache_gib": 1,
                "max_num_seqs": 32,
                **server,
            },
            layers=(1, 2, last),
            concurrency=32,
            max_sample_tokens=2000,
        )
    )
    try:
        server = open_server(extraction_server(lineage, lineage.staging), lineage.logs)
        (manifest,) = extract_shards(lineage, lineage.recipe.shards, server, lambda shard, made: None)
        _require_swept(lineage.staging)
    finally:
        stop_servers(())
    assert manifest.facts["quarantined"] == {}
    return lineage, samples


def _require_swept(staging: Path) -> None:
    """The server that goes on deletes what a killed client would have left."""
    left = staging / "cmpl-1-0.safetensors"
    left.touch()
    deadline = time.monotonic() + 60
    while left.exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _cosines(lineage: Lineage, samples: list[Sample], model: Path) -> torch.Tensor:
    """Cosine [rows, layers] of what was captured of `samples` and a Hugging Face forward of them."""
    shard = lineage.recipe.shards[0]
    reader = ShardReader([lineage.hidden_state_shards(shard).folder])
    cosines = []
    for sample in samples:
        found = reader[reader.sample_ids.index(sample.sample_id)]
        assert found["token_ids"].tolist() == sample.token_ids
        expected = _reference(model, sample.token_ids, lineage.recipe.extraction.layers)
        cosines.append(torch.cosine_similarity(found["hidden_states"].float(), expected, dim=-1))
    return torch.cat(cosines)


@pytest.mark.real
def test_captured_states_are_those_of_a_hugging_face_forward(tmp_path: Path, tiny_llama: Path) -> None:
    lengths = [10, 17, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7, *(20 + 9 * number for number in range(34))]
    in_chunks = {"extra_args": ["--max-num-batched-tokens", str(CHUNK)]}
    lineage, samples = _extract(tmp_path, tiny_llama, lengths, **in_chunks)
    cosines = _cosines(lineage, samples[:8], tiny_llama)
    assert cosines.mean(dim=0).min() > 0.999, cosines.mean(dim=0)


@pytest.mark.real
def test_states_of_mla_with_experts_are_right_in_two_ranks_and_with_unscaled_positions(
    tmp_path: Path,
) -> None:
    """All experts are chosen, because a router that flips within rounding spoils the rows of its tokens."""
    options = {"experts": 4, "experts_per_token": 4, "groups": 1, "scaled_positions": False}
    model = make_deepseek(tmp_path / "model", **options)
    lineage, samples = _extract(tmp_path, model, MLA_LENGTHS, tensor_parallel=2)
    cosines = _cosines(lineage, samples, model)
    assert cosines.mean(dim=0).min() > 0.999, cosines.mean(dim=0)


@pytest.mark.real
def test_states_of_mla_with_scaled_positions_and_few_experts_are_right(tmp_path: Path) -> None:
    """The median: where two experts are as good within rounding, the target itself chose either."""
    model = make_deepseek(tmp_path / "model")
    lineage, samples = _extract(tmp_path, model, MLA_LENGTHS)
    cosines = _cosines(lineage, samples, model)
    assert cosines.median(dim=0).values.min() > 0.999, cosines.median(dim=0)
    assert cosines[:, 0].mean() > 0.999  # what leaves the first layer saw no router


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


@pytest.mark.real
def test_the_installed_vllm_has_what_the_connector_uses_and_another_is_told() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
    )
    from vllm.v1.core.sched.output import SchedulerOutput

    from eagle3_pipeline.extraction.connector import require_fitting

    require_fitting(ExampleHiddenStatesConnector, SchedulerOutput)

    class Changed(ExampleHiddenStatesConnector):  # type: ignore[misc]
        def wait_for_save(self, layer: int) -> None:
            return None

    with pytest.raises(
        RuntimeError, match=r"does not fit this vLLM: Changed\.wait_for_save takes \('layer',"
    ):
        require_fitting(Changed, SchedulerOutput)
    with pytest.raises(RuntimeError, match="Other lacks"):
        require_fitting(ExampleHiddenStatesConnector, type("Other", (), {}))


@pytest.mark.real
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), st.data())
def test_rows_are_taken_from_the_blocks_in_their_order(blocks: list[int], data: st.DataObject) -> None:
    from eagle3_pipeline.extraction.connector import rows_of_blocks

    size = 3
    tokens = data.draw(st.integers((len(blocks) - 1) * size + 1, len(blocks) * size))
    in_order = torch.arange(10 * size * 2 * 4).reshape(10, size, 2, 4)
    rows = rows_of_blocks(in_order.transpose(1, 2), blocks, tokens)
    assert torch.equal(rows, in_order[blocks].flatten(0, 1)[:tokens])
    assert rows.untyped_storage().data_ptr() != in_order.untyped_storage().data_ptr()
