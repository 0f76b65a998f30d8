from pathlib import Path

import pytest

from eagle3_pipeline.errors import ServerDied, ServerRefused
from eagle3_pipeline.serving.diagnosis import explain_death, find_cause, news, read_lines


@pytest.mark.parametrize(
    ("line", "words", "refused"),
    [
        ("/usr/bin/python: No module named vllm", "has no vLLM", True),
        ("ModuleNotFoundError: No module named 'vllm.entrypoints'", "has no vLLM", True),
        (
            "RuntimeError: HiddenStatesConnector does not fit this vLLM: X.get_finished takes ()",
            "knows (0.32.0)",
            True,
        ),
        (
            "RuntimeError: HiddenStatesConnector does not fit this vLLM: it is 0.33.0, expected 0.32.0, and "
            "extraction.unlisted_vllm is not set",
            "or set extraction.unlisted_vllm: true",
            True,
        ),
        (
            "ImportError: cannot import name 'PendingSave' from 'vllm.distributed.kv_transfer' (x.py)",
            "knows (0.32.0)",
            True,
        ),
        ("ModuleNotFoundError: No module named 'eagle3_pipeline'", "cannot import eagle3_pipeline", True),
        ("OSError: [Errno 98] Address already in use", "port is in use", True),
        ("api_server.py: error: unrecognized arguments: --frob", "does not know a flag", True),
        ("OSError: [Errno 28] No space left on device", "disk is full", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of memory", False),
        ("RuntimeError: Cannot find any model weights with `/m`", "weights or config are missing", True),
        ("ncclUnhandledCudaError: Call to CUDA function failed.", "NCCL", False),
        ("RuntimeError: The NVIDIA driver on your system is too old (found 11040).", "GPU driver", True),
        ("ValueError: To serve one request with max seq len (8192), 9 GiB KV cache is needed, "
         "which is larger than the available KV cache memory (1 GiB).", "KV cache", True),
        ("KeyError: \"Reasoning parser 'nope' not found. Available parsers: qwen3\"", "refuses", True),
        ("!!!!!!! Segfault encountered !!!!!!!", "crashed in native code", False),
        ("(EngineCore pid=3) ERROR 01-31 12:00:00 [multiproc_executor.py:315] Worker proc VllmWorker-1 died "
         "unexpectedly (exit code: -9), shutting down executor.", "was killed or crashed", False),
        ("(APIServer pid=1) WARNING 01-31 12:00:00 [core_client.py:817] [shutdown] MPClient: engine core "
         "exited unexpectedly; starting cleanup", "was killed or crashed", False),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig", "refuses", True),
    ],
)  # fmt: skip
def test_the_likely_cause_is_told_and_only_settings_are_refused(
    line: str, words: str, refused: bool, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text(f"(APIServer pid=1) INFO 01-31 12:00:00 [x.py:1] hello\n{line}\n")
    error = explain_death("server x", log, "exit code 1", loading=True)
    assert words in str(error)
    assert line in str(error)
    assert type(error) is (ServerRefused if refused else ServerDied)
    assert type(explain_death("server x", log, None, loading=False)) is ServerDied


def test_mere_warnings_are_no_cause() -> None:
    line = "(EngineCore pid=3) WARNING 01-31 12:00:00 [cpu.py:1] CUDA graph is not supported on CPU"
    assert find_cause([line]) is None
    assert find_cause([line.replace("WARNING", "ERROR")]) is not None


def test_the_settings_that_a_failing_engine_dumps_are_no_cause() -> None:
    line = "(EngineCore pid=3) ERROR 01-31 12:00:00 [dump_input.py:72] Dumping input: trust_remote_code=False"
    assert find_cause([line]) is None


def test_of_an_unknown_cause_the_error_that_came_first_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = "(Worker pid=4) ERROR 01-31 12:00:00 [multiproc_executor.py:9] KeyError: 'layers.1.bias'"
    later = "(EngineCore pid=3) ERROR 01-31 12:00:00 [core.py:1] Exception: see above for the root cause."
    log.write_text("\n".join([first, later, *(f"noise {number}" for number in range(40))]))
    message = str(explain_death("server x", log, None, loading=True))
    assert "no known cause" in message
    assert f"  {first}\n  ...\n  noise 25\n" in message


def test_the_line_that_shows_the_cause_is_told_even_when_much_was_printed_after_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cause = "(EngineCore pid=3) ERROR 01-31 12:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory"
    log.write_text(cause + "\n" + "\n".join(f"noise {number}\n       ^^^^^^^" for number in range(40)))
    message = str(explain_death("server x", log, None, loading=True))
    assert f"  {cause}\n  ...\n  noise 25\n  noise 26" in message


def test_a_kill_from_outside_is_told_from_a_crash(tmp_path: Path) -> None:
    message = str(explain_death("server x", tmp_path / "none", "signal 9 (SIGKILL)", loading=True))
    assert "killed from outside" in message
    assert "(the log is empty)" in message


def test_the_tail_is_short_and_without_colours_and_progress_bars(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(
        b"\x1b[36m(Worker pid=1)\x1b[0m\n\n"
        + b"\n".join(b"line %d" % i for i in range(99))
        + b"\nload 0%\rload 100%\r\n"
    )
    assert read_lines(log)[0] == "(Worker pid=1)"
    assert read_lines(log)[-1] == "load 100%"
    message = str(explain_death("server x", log, None, loading=True))
    assert "line 85" in message
    assert "line 84" not in message


def test_the_news_is_the_last_line_that_tells_something(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert news(log) == "no output yet"
    log.write_text(
        "(EngineCore pid=5) INFO 01-31 12:00:00 [loader.py:3] Loading weights took 12 seconds\n"
        '(APIServer pid=1) INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK\n'
        "   ~~~~^^^^\n"
        "a library prints something\n"
    )
    assert news(log) == "Loading weights took 12 seconds"


def test_while_weights_are_loaded_the_news_is_how_many_shards_are(tmp_path: Path) -> None:
    log = tmp_path / "log"
    bar = "Loading safetensors checkpoint shards:  90% Completed | 18/20 [10:00<01:06, 33.33s/it]"
    for prefix in ("", "(EngineCore pid=7) ", "(Worker_TP0 pid=8) \r"):
        log.write_text(
            f"(EngineCore pid=7) INFO 01-31 12:00:00 [m.py:1] Starting to load model\n{prefix}{bar}\n\n"
        )
        assert news(log) == "weight shards loaded: 18 of 20"
    with log.open("a") as file:
        file.write("(EngineCore pid=7) INFO 01-31 12:00:00 [m.py:1] Loading weights took 12 seconds\n")
    assert news(log) == "Loading weights took 12 seconds"
