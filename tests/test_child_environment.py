"""What children are not told."""

import ast
from pathlib import Path

import pytest

from eagle3_pipeline.child_environment import is_secret, without_secrets

LIBRARY = Path(__file__).parents[1] / "eagle3_pipeline"
# Who starts processes without it, and why.
EXCEPTIONS = {
    "serving/process.py": "takes the environment from its callers",
    "cli/run.py": "the run of Dagster downloads and publishes",
    "cli/doctor.py": "Dagster's database may want a password",
}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "hf_token",
            "VLLM_API_KEY",
            "OPENAI_API_KEY",
            "WANDB_API_KEY",
        ),
        *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "SSH_PRIVATE_KEY", "GOOGLE_APPLICATION_CREDENTIALS"),
        *("DAGSTER_PG_URL", "EAGLE3_SLACK_WEBHOOK", "EAGLE3_MAIL_PASSWORD", "PASSWORD", "CLIENT_SECRET"),
    ],
)
def test_these_are_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HOME", "TOKENIZERS_PARALLELISM", "HF_HOME", "EAGLE3_STORAGE", "DAGSTER_HOME", "KEYBOARD"),
        *("VLLM_USE_V2_MODEL_RUNNER", "MAX_TOKENS", "SECRETARY", "CUDA_VISIBLE_DEVICES", "EAGLE3_UI_URL"),
    ],
)
def test_these_are_none(name: str) -> None:
    assert not is_secret(name)


def test_all_else_is_passed_on_as_it_is() -> None:
    environment = {"PATH": "/bin", "HF_TOKEN": "hf_x", "EMPTY": ""}
    assert without_secrets(environment) == {"PATH": "/bin", "EMPTY": ""}


def _starts(tree: ast.AST) -> list[ast.Call]:
    """Calls that start a process."""
    names = {("subprocess", "run"), ("subprocess", "Popen"), ("subprocess", "check_output"), ("os", "system")}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr) in names
    ]


def test_whoever_starts_a_process_takes_the_secrets_out_or_has_a_reason() -> None:
    found = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        if calls := _starts(ast.parse(path.read_text())):
            name = path.relative_to(LIBRARY).as_posix()
            found[name] = all(any(word.arg == "env" for word in call.keywords) for call in calls)
            assert found[name], f"{name} starts a process with all of its own environment"
            assert name in EXCEPTIONS or "without_secrets(" in path.read_text(), name
    assert found.keys() >= {*EXCEPTIONS, "provenance.py", "training/child.py", "serving/specification.py"}
