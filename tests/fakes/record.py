"""Ask the real vLLM and write down its answers: `python -m tests.fakes.record` renews tests/fakes/recorded/.

Three servers on the tiny Llama (generation with a reasoning parser, extraction, speculation with a draft) and
three that refuse to start. The stand-in is then compared with these answers, key by key and type by type. Run
it after an upgrade of vLLM; takes about three minutes.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.drafts import make_draft
from tests.models import make_llama

RECORDED = Path(__file__).parent / "recorded"
SERVED_NAME = "eagle3-recorded"
LAYERS = (1, 2, 3, 4)
START_LIMIT_S = 300


def main() -> None:
    """Record everything."""
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="eagle3-record-") as name:
        folder = Path(name)
        model = make_llama(folder / "model")
        draft = make_draft(folder / "draft", model)
        parts = sys.argv[1:] or ["generation", "extraction", "speculation", "refusals"]
        if "generation" in parts:
            with _server(model, folder, "generation", "--reasoning-parser", "deepseek_r1") as client:
                _record_generation(client)
        if "extraction" in parts:
            staging = folder / "staging"
            staging.mkdir()
            with _server(model, folder, "extraction", *extraction_flags(staging)) as client:
                _record_extraction(client)
        if "speculation" in parts:
            speculation = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
            with _server(
                model, folder, "speculation", "--speculative-config", json.dumps(speculation)
            ) as client:
                _record_speculation(client)
        if "refusals" in parts:
            _record_refusals(model, folder)


def extraction_flags(staging: Path) -> list[str]:
    """The flags of a server that captures hidden states."""
    hf_config = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": hf_config},
    }
    transfer = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "eagle3_pipeline.extraction.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(staging)},
    }
    return [
        *("--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)),
        "--no-enable-prefix-caching",
    ]


def _command(model: Path, port: int, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "512", "--gpu-memory-utilization", "0.05", "--max-num-seqs", "16"),
        *("--dtype", "bfloat16", "--enforce-eager", *flags),
    ]


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": paths, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def _server(model: Path, folder: Path, name: str, *flags: str) -> Iterator[httpx.Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / f"{name}.log"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(model, port, *flags),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            _wait(client, process, log)
            sys.stderr.write(f"{name}: ready after {time.monotonic() - started:.0f} s\n")
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        with _suppress_missing():
            os.killpg(process.pid, signal.SIGKILL)
        text = _anonymous(log.read_text(), folder, port)
        (RECORDED / f"{name}.log").write_text(text + f"[exit code {code} after SIGTERM]\n")


@contextmanager
def _suppress_missing() -> Iterator[None]:
    with suppress(ProcessLookupError):
        yield


def _wait(client: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"vLLM ended with {process.returncode}:\n{log.read_text()[-6000:]}")
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit(f"vLLM was not ready after {START_LIMIT_S} s:\n{log.read_text()[-6000:]}")


def _anonymous(text: str, folder: Path, port: int) -> str:
    """The telling lines, without what belongs to this machine: paths, addresses, process ids, colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace(str(folder), "/models").replace(str(port), "8000")
    text = re.sub(r"/[\w./-]*/(?:site-packages|lib/python[\d.]+)/", "", text)
    text = re.sub(r"pid[= ]\d+", "pid=1234", text)
    text = re.sub(r"process \[\d+\]", "process [1234]", text)
    text = re.sub(r"(tcp|ipc|file)://[\w./:-]+", r"\1://somewhere", text)
    text = re.sub(r"\b(?!127\.|0\.0\.)\d+\.\d+\.\d+\.\d+\b", "192.0.2.1", text)
    kept = [
        line
        for line in text.splitlines(keepends=True)
        if not re.search(r"Route: |nanobind|leaked|skipped", line)
    ]
    return "".join(kept)


def _answer(response: httpx.Response) -> dict[str, Any]:
    is_json = "json" in response.headers.get("content-type", "")
    body = response.json() if is_json else response.text
    return {"status": response.status_code, "type": response.headers.get("content-type"), "body": body}


def _write(name: str, answers: dict[str, Any]) -> None:
    text = json.dumps(answers, indent=1, ensure_ascii=False)
    (RECORDED / f"{name}.json").write_text(re.sub(r"/tmp/eagle3-record-\w+", "/models", text) + "\n")


def chat(text: str, **changes: Any) -> dict[str, Any]:
    """The body of a chat request as this project sends it."""
    return {
        "model": SERVED_NAME,
        "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": 100,
        "temperature": 0,
        "return_token_ids": True,
        **changes,
    }


def requests() -> dict[str, tuple[str, str, dict[str, Any] | None]]:
    """Name -> method, path and body of every request that is recorded from a generation server."""
    return {
        "health": ("GET", "/health", None),
        "version": ("GET", "/version", None),
        "models": ("GET", "/v1/models", None),
        "chat_stop": ("POST", "/v1/chat/completions", chat("What is a canal?")),
        "chat_length": ("POST", "/v1/chat/completions", chat("What is a canal?", max_completion_tokens=5)),
        "chat_max_tokens": (
            "POST",
            "/v1/chat/completions",
            chat("Hello!", max_completion_tokens=None, max_tokens=5, return_token_ids=False),
        ),
        "chat_system": (
            "POST",
            "/v1/chat/completions",
            chat(
                "", messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
            ),
        ),
        "chat_too_long": ("POST", "/v1/chat/completions", chat("a river and a canal " * 200)),
        "chat_no_room": ("POST", "/v1/chat/completions", chat("Why?", max_completion_tokens=600)),
        "chat_little_room": ("POST", "/v1/chat/completions", chat("Why?", max_completion_tokens=510)),
        "chat_wrong_model": ("POST", "/v1/chat/completions", chat("Why?", model="another")),
        "chat_bad_temperature": ("POST", "/v1/chat/completions", chat("Why?", temperature=-1)),
        "chat_no_messages": ("POST", "/v1/chat/completions", chat("Why?", messages=[])),
        "chat_messages_missing": ("POST", "/v1/chat/completions", {"model": SERVED_NAME}),
        "completion_ids": (
            "POST",
            "/v1/completions",
            {"model": SERVED_NAME, "prompt": [0, 1, 300, 301, 4, 2], "max_tokens": 1, "temperature": 0},
        ),
        "completion_ids_returned": (
            "POST",
            "/v1/completions",
            {
                "model": SERVED_NAME,
                "prompt": [0, 1, 300, 301, 4, 2],
                "max_tokens": 3,
                "temperature": 0,
                "return_token_ids": True,
            },
        ),
        "completion_too_long": (
            "POST",
            "/v1/completions",
            {"model": SERVED_NAME, "prompt": [300] * 600, "max_tokens": 1},
        ),
        "completion_bad_id": (
            "POST",
            "/v1/completions",
            {"model": SERVED_NAME, "prompt": [99999], "max_tokens": 1},
        ),
        "no_such_path": ("GET", "/v1/nothing", None),
    }


def ask(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Status, content type and body of one answer."""
    return _answer(client.request(method, path, json=body))


def _record_generation(client: httpx.Client) -> None:
    (RECORDED / "metrics_fresh.txt").write_text(client.get("/metrics").text)
    answers = {name: ask(client, *request) for name, request in requests().items()}
    metrics = client.get("/metrics")
    answers["metrics"] = {**_answer(metrics), "body": ""}
    _write("generation", answers)
    (RECORDED / "metrics.txt").write_text(metrics.text)


def extraction_requests() -> dict[str, tuple[str, str, dict[str, Any] | None]]:
    """Name -> request of every answer that is recorded from an extraction server."""
    body = {"model": SERVED_NAME, "max_tokens": 1, "temperature": 0}
    return {
        "short": ("POST", "/v1/completions", {**body, "prompt": [0, 1, 300, 301, 4, 2]}),
        "long": ("POST", "/v1/completions", {**body, "prompt": [0, 1, *range(100, 500), 4, 2]}),
        "too_long": ("POST", "/v1/completions", {**body, "prompt": [300] * 600}),
    }


def describe_states(path: Path) -> dict[str, Any]:
    """Names, types and shapes of the tensors of a file, once it is there, and what lies beside it."""
    from safetensors import safe_open

    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        described = {
            name: {"dtype": one.get_dtype(), "shape": one.get_shape()} for name, one in slices.items()
        }
        described["token_ids"]["values"] = file.get_tensor("token_ids").tolist()
        metadata = file.metadata()
    beside = sorted(
        one.name.replace(path.name, "NAME") for one in path.parent.iterdir() if path.name in one.name
    )
    return {"tensors": described, "metadata": metadata, "beside": beside, "in_staging_folder": True}


def _record_extraction(client: httpx.Client) -> None:
    answers = {}
    for name, request in extraction_requests().items():
        answers[name] = ask(client, *request)
        parameters = answers[name]["body"].get("kv_transfer_params") or {}
        if "hidden_states_path" in parameters:
            answers[name]["file"] = describe_states(Path(parameters["hidden_states_path"]))
            parameters["hidden_states_path"] = "/staging/" + Path(parameters["hidden_states_path"]).name
    _write("extraction", answers)


def _record_speculation(client: httpx.Client) -> None:
    (RECORDED / "metrics_speculation_fresh.txt").write_text(client.get("/metrics").text)
    answer = ask(client, "POST", "/v1/chat/completions", chat("What is a canal?"))
    _write("speculation", {"chat_stop": answer})
    (RECORDED / "metrics_speculation.txt").write_text(client.get("/metrics").text)


def _record_refusals(model: Path, folder: Path) -> None:
    cases = {
        "unknown_flag": _command(model, 8000, "--no-such-flag", "1"),
        "no_such_model": _command(folder / "nothing", 8000),
        "heads_not_divisible": _command(model, 8000, "--tensor-parallel-size", "3"),
    }
    answers = {}
    for name, command in cases.items():
        found = subprocess.run(
            command, capture_output=True, text=True, env=_environment(), timeout=300, check=False
        )
        answers[name] = {
            "exit": found.returncode,
            "stdout": _anonymous(found.stdout, folder, 8000)[-3000:],
            "stderr": _anonymous(found.stderr, folder, 8000)[-3000:],
        }
    _write("refusals", answers)


if __name__ == "__main__":
    main()
