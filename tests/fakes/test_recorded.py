"""The stand-in against recorded answers of the real vLLM: same keys, same types, same errors."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.heads import head_of
from tests.fakes.process import stand_in
from tests.fakes.record import (
    RECORDED,
    ask,
    chat,
    describe_states,
    extraction_flags,
    extraction_requests,
    requests,
)
from tests.fakes.states import expected_states

# What is text in one answer and null in another, by how the answer ended.
_NULLABLE = {"choices[].message.content", "choices[].message.reasoning"}
_CONTEXT = ("--max-model-len", "512")


def recorded(name: str) -> dict[str, Any]:
    answers: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return answers


def shape(value: Any, path: str = "") -> dict[str, str]:
    """Path -> type of every value in a JSON tree; a list is described by its first element."""
    if path in _NULLABLE:
        return {path: "text or null"}
    if isinstance(value, dict):
        found = {path: "dict"}
        for key, one in value.items():
            found |= shape(one, f"{path}.{key}".lstrip("."))
        return found
    if isinstance(value, list):
        return {path: "list"} | (shape(value[0], f"{path}[]") if value else {})
    return {path: type(value).__name__}


def without_numbers(answer: dict[str, Any]) -> dict[str, Any]:
    """An error with its words, and any number of the prompt's length in it left out."""
    found: dict[str, Any] = json.loads(re.sub(r"\d{3}(?= input)|value=\d+", "N", json.dumps(answer)))
    return found


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("stand-in")
    with stand_in(folder, tiny_llama, *_CONTEXT, "--reasoning-parser", "deepseek_r1") as server:
        yield server.client


@pytest.mark.parametrize("name", [*requests(), "metrics"])
def test_an_answer_has_the_shape_of_the_real_servers(name: str, generation: httpx.Client) -> None:
    method, path, body = requests().get(name, ("GET", "/metrics", None))
    real, fake = recorded("generation")[name], ask(generation, method, path, body)
    if name == "metrics":
        fake["body"] = ""
    assert fake["type"] == real["type"]
    assert fake["status"] == real["status"]
    assert shape(fake["body"]) == shape(real["body"])


@pytest.mark.parametrize(
    "name", [name for name, answer in recorded("generation").items() if answer["status"] != 200]
)
def test_a_refusal_has_the_words_of_the_real_servers(name: str, generation: httpx.Client) -> None:
    real, fake = recorded("generation")[name], ask(generation, *requests()[name])
    if name != "chat_messages_missing":  # pydantic's own wording
        assert without_numbers(fake) == without_numbers(real)


def test_the_prompt_is_rendered_and_counted_as_by_the_real_server(generation: httpx.Client) -> None:
    for name in ("chat_stop", "chat_system"):
        real, fake = recorded("generation")[name]["body"], ask(generation, *requests()[name])["body"]
        assert fake["prompt_token_ids"] == real["prompt_token_ids"]
        assert fake["usage"]["prompt_tokens"] == real["usage"]["prompt_tokens"]


def test_a_server_without_a_reasoning_parser_answers_in_the_shape_of_the_real_one(
    tmp_path: Path, tiny_llama: Path
) -> None:
    real = recorded("speculation")["chat_stop"]
    with stand_in(tmp_path, tiny_llama, *_CONTEXT) as server:
        fake = ask(server.client, "POST", "/v1/chat/completions", chat("What is a canal?"))
    assert shape(fake["body"]) == shape(real["body"])
    assert fake["body"]["choices"][0]["message"]["reasoning"] is None
    assert fake["body"]["choices"][0]["message"]["content"]


def families(text: str) -> dict[str, tuple[str, set[tuple[str, ...]]]]:
    """Name -> type and the sets of label names of each family of vLLM's own."""
    return {
        one.name: (one.type, {tuple(sorted(sample.labels)) for sample in one.samples})
        for one in text_string_to_metric_families(text)
        if one.name.startswith("vllm:")
    }


@pytest.mark.parametrize("source", ["metrics", "metrics_speculation"])
def test_metrics_have_the_names_types_and_labels_of_the_real_servers(
    source: str, tmp_path: Path, tiny_llama: Path
) -> None:
    speculation = json.dumps({"method": "eagle3", "model": "draft", "num_speculative_tokens": 3})
    flags = ("--speculative_config", speculation) if source == "metrics_speculation" else ()
    with stand_in(tmp_path, tiny_llama, *_CONTEXT, *flags) as server:
        ask(server.client, "POST", "/v1/chat/completions", chat("What is a canal?"))
        text = server.client.get("/metrics").text
    assert families(text) == families((RECORDED / f"{source}_fresh.txt").read_text())


def test_hidden_states_have_the_names_types_and_shapes_of_the_real_connectors(
    tmp_path: Path, tiny_llama: Path
) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    with stand_in(tmp_path, tiny_llama, *_CONTEXT, *extraction_flags(staging)) as server:
        for name, request in extraction_requests().items():
            real, fake = recorded("extraction")[name], ask(server.client, *request)
            assert fake["status"] == real["status"]
            assert shape(fake["body"]) == shape(real["body"])
            if "file" in real:
                path = Path(fake["body"]["kv_transfer_params"]["hidden_states_path"])
                assert path.parent == staging
                assert re.fullmatch(r"cmpl-[0-9a-f]{16}-0-[0-9a-f]{8}\.safetensors", path.name)
                assert describe_states(path) == real["file"]


def test_hidden_states_are_the_known_function_of_ids_and_layers(tmp_path: Path, tiny_llama: Path) -> None:
    from safetensors.torch import load_file

    staging = tmp_path / "staging"
    staging.mkdir()
    request = extraction_requests()["short"]
    assert request[2] is not None
    with stand_in(tmp_path, tiny_llama, *_CONTEXT, *extraction_flags(staging)) as server:
        path = Path(ask(server.client, *request)["body"]["kv_transfer_params"]["hidden_states_path"])
        describe_states(path)
        states = load_file(path)["hidden_states"]
    expected = expected_states(request[2]["prompt"], (1, 2, 3, 4), 64, head_of(tiny_llama))
    assert (states.float().numpy() == expected).all()


@pytest.mark.parametrize("name", ["unknown_flag", "no_such_model"])
def test_a_refused_start_ends_with_the_status_and_last_words_of_the_real_server(
    name: str, tmp_path: Path, tiny_llama: Path
) -> None:
    real = recorded("refusals")[name]
    model = tiny_llama if name == "unknown_flag" else Path("/models/nothing")
    flags = ("--no-such-flag", "1") if name == "unknown_flag" else ()
    with stand_in(tmp_path, model, *flags, ready=False) as server:
        assert server.process.wait(20) == real["exit"]
        last = real["stderr"].strip().splitlines()[-1]
        assert server.log.read_text().strip().splitlines()[-1] == last
