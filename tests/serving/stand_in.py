"""A small real process that lives like a vLLM server: it loads, has children, answers, crashes, hangs.

python stand_in.py [--behave WORD,WORD...] --served-model-name NAME --port N     (other arguments are ignored)

crash         print a log with a known cause and end with exit code 1
crash-late    the same after 18 of 20 weight shards
inner-limit   what vLLM prints when its own limit for the engine's start runs out
stalled       answer everything, but /metrics shows a request that gets no token
hang          never listen
other-name    serve under another name
deaf          leader and child ignore SIGTERM
orphan        a child in the same session whose name and environment are not ours to see, its parent gone
runaway       a child in a session of its own, its parent gone
slow          load for one second
"""

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CRASH = """(EngineCore pid=7) WARNING 01-31 12:00:00 [x.py:1] Cannot find any model weights, merely warned of
(EngineCore pid=7) ERROR 01-31 12:00:01 [core.py:9] EngineCore failed to start.
(EngineCore pid=7) ERROR 01-31 12:00:01 [core.py:9] torch.OutOfMemoryError: CUDA out of memory.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def add_child(words: list[str]) -> None:
    child = os.fork()
    if child:
        # As vLLM does it: the leader takes its children down.
        signal.signal(signal.SIGTERM, lambda *_: (os.kill(child, signal.SIGKILL), os._exit(0)))
        if {"orphan", "runaway"} & {*words}:
            os.waitpid(child, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return
    if "orphan" in words:
        if os.fork():
            os._exit(0)
        os.execve("/bin/sleep", ["VLLM::EngineCore", "600"], {})
    if "runaway" in words:
        if os.fork():
            os._exit(0)
        os.setsid()
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    os._exit(0)


LATE = """Loading safetensors checkpoint shards:   0% Completed | 0/20 [00:00<?, ?it/s]
Loading safetensors checkpoint shards:  90% Completed | 18/20 [10:00<01:06, 33.33s/it]
"""
INNER_LIMIT = (
    "(APIServer pid=7) ERROR 01-31 12:10:00 [core_client.py:740] TimeoutError: Timed out waiting for engine "
    "core processes to start. This is often caused by slow weight loading for large models. Waited 600s "
    "(configured by VLLM_ENGINE_READY_TIMEOUT_S)."
)
METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} %d
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 42.0
"""


class Handler(BaseHTTPRequestHandler):
    name = ""
    running = 0

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": self.name}]}).encode()
        if self.path == "/metrics":
            body = (METRICS % self.running).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *values: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--behave", default="")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    words = arguments.behave.split(",")
    print(f"(APIServer pid={os.getpid()}) INFO 01-31 12:00:00 [x.py:1] loading weights", flush=True)
    if "crash" in words:
        sys.exit(CRASH)
    if "crash-late" in words:
        sys.exit(LATE + CRASH)
    if "inner-limit" in words:
        sys.exit(INNER_LIMIT)
    add_child(words)
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "hang" in words:
        time.sleep(600)
    if "slow" in words:
        time.sleep(1)
    Handler.name = "another-model" if "other-name" in words else arguments.served_model_name
    Handler.running = int("stalled" in words)
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
