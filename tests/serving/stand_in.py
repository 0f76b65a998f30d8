"""A small real process that lives like a vLLM server: it loads, has children, answers, crashes, hangs.

python stand_in.py [--behave WORD,WORD...] --served-model-name NAME --port N     (other arguments are ignored)

crash         print a log with a known cause and end with exit code 1
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


class Handler(BaseHTTPRequestHandler):
    name = ""

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": self.name}]}).encode()
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
    add_child(words)
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "hang" in words:
        time.sleep(600)
    if "slow" in words:
        time.sleep(1)
    Handler.name = "another-model" if "other-name" in words else arguments.served_model_name
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
