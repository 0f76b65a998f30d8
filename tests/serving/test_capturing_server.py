"""What a server that captures hidden states is started with, beyond any other."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import RecipeError, ServerRefused
from eagle3_pipeline.known_vllm import UNLISTED_VARIABLE
from eagle3_pipeline.recipe.server import ServerSettings
from eagle3_pipeline.serving import specification
from eagle3_pipeline.serving.arguments import rope_flags
from eagle3_pipeline.serving.specification import extraction_server, generation_server
from tests.serving import test_specification
from tests.serving.test_specification import make_lineage

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
MLA = {"kv_lora_rank": 512}


def test_the_model_runner_is_said_to_the_server_and_is_in_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = extraction_server(make_lineage(tmp_path), tmp_path)
    assert plain.env[RUNNER] == "0"
    assert RUNNER not in generation_server(make_lineage(tmp_path)).env
    on_gpu = {"partitions": {"extraction": "0"}}
    v2 = extraction_server(make_lineage(tmp_path, **on_gpu), tmp_path)
    assert v2.env[RUNNER] == "1"
    monkeypatch.setenv(RUNNER, "0")
    v1 = extraction_server(make_lineage(tmp_path, **on_gpu), tmp_path)
    assert v1.env[RUNNER] == "0"
    assert v1.fingerprint != v2.fingerprint


def test_an_untried_vllm_is_refused_before_the_start_unless_the_recipe_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specification, "vllm_version", lambda python: "vllm 0.99.0")
    with pytest.raises(ServerRefused, match=r"has vllm 0\.99\.0; .* tried with 0\.32\.0"):
        extraction_server(make_lineage(tmp_path), tmp_path)
    assert generation_server(make_lineage(tmp_path)).phase == "generation"
    extraction = {"layers": [2, 15, 27, 30], "unlisted_vllm": True}
    taken = extraction_server(make_lineage(tmp_path, extraction=extraction), tmp_path)
    assert (taken.phase, taken.env[UNLISTED_VARIABLE]) == ("extraction", "1")
    # A distribution of another name is not seen from outside: the server is told to look by itself.
    monkeypatch.setattr(specification, "vllm_version", lambda python: "unknown")
    monkeypatch.setenv(UNLISTED_VARIABLE, "1")
    assert extraction_server(make_lineage(tmp_path), tmp_path).env[UNLISTED_VARIABLE] == "0"


def test_the_server_that_generates_may_capture_too_and_is_another_one_then(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path)
    plain, capturing = generation_server(lineage), generation_server(lineage, capturing=tmp_path / "s")
    assert capturing.phase == "generation"
    assert "extract_hidden_states" in " ".join(capturing.argv)
    assert str(tmp_path / "s") in " ".join(capturing.argv)
    assert "--no-enable-prefix-caching" in capturing.argv
    assert capturing.fingerprint != plain.fingerprint


def _rope(config: dict[str, Any], **settings: Any) -> tuple[str, ...]:
    return rope_flags(ServerSettings.model_validate(settings), config, "extraction")


def test_mla_on_the_cpu_leaves_the_kernel_that_misreads_its_positions() -> None:
    wanted = ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}')
    assert _rope(MLA, enforce_eager=True) == wanted
    assert _rope({"text_config": MLA}, enforce_eager=True) == wanted
    assert _rope(MLA) == ()  # compiled: not used
    assert _rope({}, enforce_eager=True) == ()


def test_a_compilation_config_of_the_recipe_has_to_carry_it_too() -> None:
    for flag in ("--compilation-config", "-cc", "--compilation_config"):
        with pytest.raises(RecipeError, match="-rotary_embedding"):
            _rope(MLA, enforce_eager=True, extra_args=[flag, '{"mode": 0}'])
    value = json.dumps({"mode": 0, "custom_ops": ["-rotary_embedding"]})
    assert _rope(MLA, enforce_eager=True, extra_args=["--compilation-config", value]) == ()


def test_every_phase_on_the_cpu_has_it_and_gpus_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_specification, "CONFIG", test_specification.CONFIG | MLA)
    eager = {"server": {"common": {"enforce_eager": True}}}
    on_cpu = make_lineage(tmp_path, **eager)
    on_gpus = make_lineage(tmp_path, partitions={"generation": "0", "extraction": "0"}, **eager)
    for lineage, expected in ((on_cpu, True), (on_gpus, False)):
        for spec in (generation_server(lineage), extraction_server(lineage, tmp_path)):
            assert ("--compilation-config" in spec.argv) == expected
