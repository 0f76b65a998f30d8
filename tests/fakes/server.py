"""A stand-in of vLLM's OpenAI server: its command line, its paths, its answers, its ways to fail; no model.

    tests/fakes/python -m vllm.entrypoints.openai.api_server --model DIR --port 8000 ...

starts it in half a second. Answers follow from the prompt's token ids alone (real chat template and
tokenizer of DIR); hidden states from `tests.fakes.states.expected_states`. Their shape is compared with
recorded answers of the real server (tests/fakes/recorded, renewed by `python -m tests.fakes.record`).

Faults are set by variables FAKE_<NAME>, or, at any time, by a JSON file with the lower-case names
(`FAKE_CONTROL=path`, written by `tests.fakes.faults.write_control`), whose settings come before the
variables'. A *share* is the part of the prompts, chosen by their ids, that is hit: 1.0 hits all.

    start
      CRASH_LOG=text, CRASH_EXIT=1     write the text to the log and end at once
      LOAD_SECONDS=0                   load for so long, with a real load's lines; no connection meanwhile
      CHILDREN=0                       so many child processes, as vLLM's engine and workers; a stop ends them
    life
      DIE_AFTER_REQUESTS=n             the request after n answered ones kills the process (children live on)
      ENGINE_DIES_AFTER_REQUESTS=n     the same for the engine: HTTP 500, then the server stops by itself
      DIE_SIGNAL=SIGUSR1               die at this signal, like a crash
      IGNORE_SIGTERM=1                 only SIGKILL helps
      HANG_AFTER_REQUESTS=n            after n answered requests no more tokens come; /health stays well
    refusals
      BUSY_REQUESTS=n                  the first n requests are sent away ...
      BUSY_STATUS=503, RETRY_AFTER=1   ... with this status and header ('' for none)
      REFUSE_MARKER=text               HTTP 400 for prompts that contain it
    answers
      MEAN_TOKENS=24, LONG_TAIL=1      completion length, uniform in half to three halves, or log-normal
      TRUNCATED_SHARE                  never ends
      DEGENERATE_SHARE                 three tokens over and over, up to the limit
      EMPTY_SHARE                      ends at once
      NO_REASONING=1                   no thoughts although --reasoning-parser is given
      FIRST_TOKEN_SECONDS, SECONDS_PER_TOKEN    latency; a draft saves steps
      ACCEPTANCE=0.5                   probability that a proposed token is accepted, at every position
    load
      KNEE=n                           beyond n running requests each takes longer by the power 1.5 of their
                                       number, so that all together make fewer tokens
      CACHE_REQUESTS=n                 the KV cache is full with n running requests; each one more preempts
    hidden states
      TORN_SHARE, NAN_SHARE            a file cut off after two thirds; one NaN
      SHORT_SHARE, WRONG_IDS_SHARE     a row too few; another last token id
      LATE_STATES_SECONDS=0            the file appears so long after the answer
      NO_STATES_SHARE                  the file is named and never appears
      NO_ROOM_AFTER=n                  after n files the disk is full

FAKE_REQUEST_LOG=path: JSON lines {"event": "start" | "request" | "answer" | "stop", "pid", "time", ...}, each
written when it happens; `tests.fakes.log.read_log` reads them.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from tests.fakes.arguments import Arguments, parse
from tests.fakes.endpoints import Endpoints
from tests.fakes.faults import FaultSettings
from tests.fakes.log import say, write_log


def main() -> None:
    """Parse vLLM's command line, load, serve until SIGTERM or SIGINT."""
    arguments = parse(sys.argv[1:])
    settings = FaultSettings()
    faults = settings.now()
    write_log("start", argv=sys.argv[1:], model=arguments.served_name, port=arguments.port)
    if faults.die_signal:
        signal.signal(signal.Signals[faults.die_signal], _die)
    if faults.crash_log:
        sys.stderr.write(faults.crash_log + "\n")
        sys.exit(faults.crash_exit)
    if not (arguments.model / "config.json").is_file():
        sys.exit(
            "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
            f"'{arguments.model}'. Use `repo_type` argument if needed."
        )
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((arguments.host, arguments.port))  # before loading and without listening, as vLLM does
    children = [subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL) for _ in range(faults.children)]
    try:
        _load(arguments, faults.load_seconds)
        _serve(arguments, settings, bound)
    finally:
        for child in children:
            child.kill()
            child.wait()
        write_log("stop")


def _die(number: int, frame: FrameType | None) -> None:
    os._exit(1)


def _load(arguments: Arguments, seconds: float) -> None:
    """The lines of a real load, spread over its time."""
    lines = [
        f"[api_utils.py:286] non-default args: {{'model': '{arguments.model}', 'port': {arguments.port}}}",
        "[model.py:733] Resolved architecture: LlamaForCausalLM",
        f"[model.py:2152] Using max model len {arguments.max_model_len}",
        "[core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: (the stand-in has none)",
        f"[cpu_model_runner.py:68] Starting to load model {arguments.model}...",
        "[default_loader.py:501] Loading weights took 0.01 seconds",
        "[kv_cache_utils.py:2327] CPU KV cache size: 1,048,576 tokens, Maximum concurrency: 2048.00x",
        "[core.py:402] init engine (profile, create kv cache, warmup model) took 0.70 s",
    ]
    for line in lines:
        say(line)
        time.sleep(seconds / len(lines))


def _serve(arguments: Arguments, settings: FaultSettings, bound: socket.socket) -> None:
    server: list[uvicorn.Server] = []
    endpoints = Endpoints(arguments, settings, stop=lambda: setattr(server[0], "should_exit", True))
    app = Starlette(routes=endpoints.routes(), exception_handlers={HTTPException: endpoints.refuse_path})
    config = uvicorn.Config(app, log_level="info", access_log=False, timeout_graceful_shutdown=1)
    server.append(_Uvicorn(config, settings))
    say(f"[entry.py:140] Starting vLLM server on http://{arguments.host}:{arguments.port}")
    server[0].run(sockets=[bound])


class _Uvicorn(uvicorn.Server):
    """Ends when asked to, unless the settings of that moment say otherwise."""

    def __init__(self, config: uvicorn.Config, settings: FaultSettings) -> None:
        super().__init__(config)
        self._settings = settings

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._settings.now().ignore_sigterm:
            self.should_exit = True  # without uvicorn's second raising of the signal: vLLM exits with 0


if __name__ == "__main__":
    main()
