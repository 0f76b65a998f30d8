import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle3_pipeline
from eagle3_pipeline.errors import BadInput, MissingInput, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.recipe.extras import FLAG_OF_SETTING
from eagle3_pipeline.recipe.models import Target
from eagle3_pipeline.recipe.server import ServerSettings
from eagle3_pipeline.serving import specification
from eagle3_pipeline.serving.arguments import server_arguments
from eagle3_pipeline.serving.specification import (
    ServerSpec,
    evaluation_server,
    extraction_server,
    generation_server,
    vllm_version,
)

REPOSITORY = Path(eagle3_pipeline.__file__).parent.parent
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 8,
    "num_hidden_layers": 30,
    "n_routed_experts": 16,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}


def make_lineage(tmp_path: Path, *, target: str = "t1", **changes: Any) -> Lineage:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").touch()
    values: dict[str, Any] = {
        "name": "small",
        "target": {"path": str(tmp_path / "model")},
        "prompts": {"sources": [{"path": str(tmp_path / "p.jsonl")}], "count": 2, "per_shard": 2},
        "extraction": {"layers": [2, 15, 27, 30]},
        "evaluation": {"sets": [{"name": "few", "path": str(tmp_path / "e.jsonl")}]},
        **changes,
    }
    lineage = Lineage(Recipe.model_validate(values), tmp_path / f"storage-{target}")
    place = lineage.target_model()
    place.folder.mkdir(parents=True, exist_ok=True)
    place.finish([], {"model_path": str(tmp_path / "model"), "model_fingerprint": target})
    return lineage


def value_of(spec: ServerSpec, flag: str) -> str:
    return spec.argv[spec.argv.index(flag) + 1]


def test_a_server_runs_the_module_of_vllm_on_the_loopback_under_its_own_name(tmp_path: Path) -> None:
    common = {
        "max_model_len": 8192,
        "reasoning_parser": "qwen3",
        "max_num_seqs": 64,
        "extra_args": ["--seed", "1"],
    }
    spec = generation_server(make_lineage(tmp_path, server={"common": common}))
    assert spec.argv[:5] == (
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model"),
    )  # fmt: skip
    assert value_of(spec, "--host") == "127.0.0.1"
    assert value_of(spec, "--served-model-name") == spec.served_name == f"eagle3-{spec.fingerprint[:12]}"
    assert value_of(spec, "--max-model-len") == "8192"
    assert value_of(spec, "--reasoning-parser") == "qwen3"
    assert value_of(spec, "--seed") == "1"
    assert value_of(spec, "--dtype") == "bfloat16"
    for absent in ("--port", "--quantization", "--enforce-eager", "--enable-expert-parallel", "--api-key"):
        assert absent not in spec.argv
    assert spec.partition == ()


def test_the_extraction_server_captures_the_recipes_layers_without_prefix_cache(tmp_path: Path) -> None:
    spec = extraction_server(
        make_lineage(tmp_path, server={"extraction": {"enforce_eager": True}}), tmp_path / "s"
    )
    assert json.loads(value_of(spec, "--speculative_config")) == {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27, 30]}},
    }
    assert json.loads(value_of(spec, "--kv_transfer_config")) == {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "eagle3_pipeline.extraction.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "s")},
    }
    assert "--no-enable-prefix-caching" in spec.argv
    assert "--enforce-eager" in spec.argv
    assert spec.env["PYTHONPATH"].split(":")[0] == str(REPOSITORY)


def test_the_evaluation_server_speculates_with_the_draft_and_knows_when_it_was_made_again(
    tmp_path: Path,
) -> None:
    lineage = make_lineage(
        tmp_path, evaluation={"sets": [{"name": "few", "path": "e"}], "speculative_tokens": 5}
    )
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"1")
    first, plain = evaluation_server(lineage, draft), evaluation_server(lineage, None)
    assert json.loads(value_of(first, "--speculative_config")) == {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": 5,
    }
    assert "--speculative_config" not in plain.argv
    assert first.fingerprint != plain.fingerprint
    assert evaluation_server(lineage, draft) == evaluation_server(lineage, draft, 5) == first
    fewer = evaluation_server(lineage, draft, 2)
    assert json.loads(value_of(fewer, "--speculative_config"))["num_speculative_tokens"] == 2
    assert evaluation_server(lineage, None, 2) == plain
    (draft / "model.safetensors").write_bytes(b"22")
    assert evaluation_server(lineage, draft).fingerprint != first.fingerprint


def test_the_inner_time_limit_follows_the_outer_and_sizes_reach_the_environment(tmp_path: Path) -> None:
    common = {"start_timeout_s": 3600.5, "cpu_kv_cache_gib": 1.5, "extra_env": {"NCCL_DEBUG": "INFO"}}
    env = generation_server(make_lineage(tmp_path, server={"common": common})).env
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "3601"
    assert int(env["VLLM_ENGINE_READY_TIMEOUT_S"]) >= common["start_timeout_s"]
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["NCCL_DEBUG"] == "INFO"
    assert "CUDA_VISIBLE_DEVICES" not in env


def test_extra_env_wins_over_what_we_set_and_may_free_the_core_that_vllm_reserves(tmp_path: Path) -> None:
    extra = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "7", "VLLM_NO_USAGE_STATS": "0"}
    common = {"cpu_kv_cache_gib": 2, "extra_env": extra}
    spec = generation_server(make_lineage(tmp_path, server={"common": common}))
    assert spec.env.items() >= extra.items()


def test_gpus_are_those_behind_the_outer_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = make_lineage(
        tmp_path,
        partitions={"generation": "0-1"},
        server={"generation": {"tensor_parallel": 2, "expert_parallel": True}},
    )
    unmasked = generation_server(lineage)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    spec = generation_server(lineage)
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert spec.partition == ("0", "1")
    assert value_of(spec, "--tensor-parallel-size") == "2"
    assert "--enable-expert-parallel" in spec.argv
    assert spec.fingerprint != unmasked.fingerprint


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_model_len": st.integers(1, 10**6),
            "tensor_parallel": st.integers(1, 8),
            "pipeline_parallel": st.integers(1, 8),
            "data_parallel": st.integers(1, 8),
            "quantization": st.sampled_from(["fp8", "awq"]),
            "dtype": st.sampled_from(["float32", "auto"]),
            "gpu_memory_utilization": st.floats(0.1, 1),
            "max_num_seqs": st.integers(1, 512),
            "reasoning_parser": st.sampled_from(["qwen3", "kimi_k2"]),
            "expert_parallel": st.booleans(),
            "enforce_eager": st.booleans(),
        },
    )
)
def test_every_setting_that_is_set_appears_exactly_once(values: dict[str, Any]) -> None:
    settings = ServerSettings.model_validate({**values, "extra_args": ["--seed", "1"]})
    argv = server_arguments(settings, Path("/model"), ("--phase", "x"), trust_remote_code=True)
    for name, flag in FLAG_OF_SETTING.items():
        value = getattr(settings, name)
        assert argv.count(flag) == (value is not None and value is not False)
        if flag in argv and value is not True:
            assert argv[argv.index(flag) + 1] == str(value)
    assert argv[-4:] == ("--phase", "x", "--seed", "1")
    flags = [argument for argument in argv if argument.startswith("--")]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (
            {"tensor_parallel": 8, "expert_parallel": True},
            ("--tensor-parallel-size 8", "--data-parallel-size 1", "--enable-expert-parallel"),
        ),
        (
            {"data_parallel": 8, "expert_parallel": True},
            ("--tensor-parallel-size 1", "--data-parallel-size 8", "--enable-expert-parallel"),
        ),
        (
            {"tensor_parallel": 4, "pipeline_parallel": 2},
            ("--tensor-parallel-size 4", "--pipeline-parallel-size 2", "--data-parallel-size 1"),
        ),
    ],
)
def test_eight_gpus_are_shared_out_in_each_form(
    tmp_path: Path, settings: dict[str, Any], wanted: tuple[str, ...]
) -> None:
    lineage = make_lineage(
        tmp_path, partitions={"generation": "0-7"}, server={"generation": {**settings, "quantization": "fp8"}}
    )
    spec = generation_server(lineage)
    line = " ".join(spec.argv)
    assert all(f" {part} " in line for part in (*wanted, "--quantization fp8"))
    assert ("--enable-expert-parallel" in line) == ("expert_parallel" in settings)
    assert spec.env["CUDA_VISIBLE_DEVICES"].count(",") == 7
    assert "VLLM_CPU_OMP_THREADS_BIND" not in spec.env


CHANGES_THE_SERVER: dict[str, Any] = {
    "max_model_len": 4096,
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "data_parallel": 2,
    "expert_parallel": True,
    "quantization": "fp8",
    "dtype": "float32",
    "gpu_memory_utilization": 0.5,
    "cpu_kv_cache_gib": 4,
    "max_num_seqs": 7,
    "enforce_eager": True,
    "reasoning_parser": "qwen3",
    "extra_args": ["--seed", "2"],
    "extra_env": {"NCCL_DEBUG": "INFO"},
}
LEAVES_THE_SERVER: dict[str, Any] = {
    "python": Path(sys.executable),
    "port": 8123,
    "start_timeout_s": 5,
    "stall_timeout_s": 5,
    "idle_timeout_s": 5,
}


def test_every_setting_is_known_to_change_the_server_or_to_leave_it() -> None:
    assert {*CHANGES_THE_SERVER, *LEAVES_THE_SERVER} == set(ServerSettings.model_fields)
    assert not set(CHANGES_THE_SERVER) & set(LEAVES_THE_SERVER)


def _changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> bool:
    """Whether the change of one setting gives another fingerprint, on a machine of four cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    base = {"data_parallel": 2} if name == "expert_parallel" else {}
    prints = [
        generation_server(make_lineage(tmp_path, server={"generation": settings})).fingerprint
        for settings in (base, {**base, name: value})
    ]
    return prints[0] != prints[1]


@pytest.mark.parametrize("name", CHANGES_THE_SERVER)
def test_what_may_change_replies_or_capacity_changes_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert _changed(tmp_path, monkeypatch, name, CHANGES_THE_SERVER[name])


@pytest.mark.parametrize("name", LEAVES_THE_SERVER)
def test_port_python_and_time_limits_leave_the_fingerprint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert not _changed(tmp_path, monkeypatch, name, LEAVES_THE_SERVER[name])


def test_a_target_that_cannot_be_split_so_is_refused_before_anything_starts(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, server={"evaluation": {"tensor_parallel": 3}})
    with pytest.raises(RecipeError, match=r"server\.evaluation\.tensor_parallel is 3, .*: 1, 2, 4, 8\."):
        evaluation_server(lineage, None)
    assert generation_server(lineage).phase == "generation"


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("config.json", "is no model folder: it has no config.json"),
        ("model.safetensors", r"has no \*\.safetensors"),
    ],
)
def test_a_model_folder_that_is_none_any_more_is_refused(tmp_path: Path, gone: str, message: str) -> None:
    # Of a downloaded target: a local one that changed is another target, and not made yet.
    recipe = make_lineage(tmp_path).recipe
    hub = recipe.model_copy(update={"target": Target(hub_id="some/model")})
    lineage = Lineage(hub, tmp_path / "storage")
    place = lineage.target_model()
    place.folder.mkdir(parents=True)
    place.finish([], {"model_path": str(tmp_path / "model"), "model_fingerprint": "t1"})
    assert generation_server(lineage).model == tmp_path / "model"
    (tmp_path / "model" / gone).unlink()
    with pytest.raises(BadInput, match=message):
        generation_server(lineage)


def test_another_model_in_the_same_folder_and_inherited_settings_change_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generation_server(make_lineage(tmp_path))
    assert generation_server(make_lineage(tmp_path, target="t2")).fingerprint != plain.fingerprint
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/tmp/x")
    assert generation_server(make_lineage(tmp_path)).fingerprint == plain.fingerprint
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "X")
    assert generation_server(make_lineage(tmp_path)).fingerprint != plain.fingerprint


def test_our_own_code_in_the_extraction_server_is_in_its_fingerprint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = make_lineage(tmp_path)
    extraction, generation = extraction_server(lineage, tmp_path), generation_server(lineage)
    shutil.copytree(REPOSITORY / "eagle3_pipeline", tmp_path / "code")
    monkeypatch.setattr(specification.eagle3_pipeline, "__file__", str(tmp_path / "code" / "__init__.py"))
    monkeypatch.setattr(specification, "import_path", lambda: None)
    assert extraction_server(lineage, tmp_path).fingerprint == extraction.fingerprint
    (tmp_path / "code" / "extraction" / "connector.py").write_text("# changed")
    assert extraction_server(lineage, tmp_path).fingerprint != extraction.fingerprint
    assert generation_server(lineage).fingerprint == generation.fingerprint


def test_a_draft_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"no draft folder .*/none\. Materialise draft_checkpoint"):
        evaluation_server(make_lineage(tmp_path), tmp_path / "none")


def test_without_a_target_model_the_asset_to_make_is_named(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path)
    (lineage.target_model().folder / "manifest.json").unlink()
    with pytest.raises(MissingInput, match="target_model"):
        generation_server(lineage)


def test_the_servers_own_python_is_asked_for_its_vllm(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert vllm_version(str(python)) == vllm_version(sys.executable)
    assert vllm_version("/no/such/python") == "unknown"


def test_serving_works_without_torch_and_without_vllm() -> None:
    code = (
        "import sys; import eagle3_pipeline.serving.server, eagle3_pipeline.serving.metrics; "
        "print(sorted({'torch', 'vllm', 'dagster', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    assert done.stdout.strip() == "[]"
