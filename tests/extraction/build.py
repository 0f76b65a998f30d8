"""A lineage whose samples are made and audited, and a stand-in server that writes states of known values.

The stand-in lives in the test's own process, so that a test can look at each request and let any of them
fail. The whole way through a server process is tested in test_with_server_process.py.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import ServerDied
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.samples import SAMPLES_NAME, Sample, write_samples
from tests.extraction.target import HIDDEN, NUM_LAYERS, TARGET, VOCAB, make_target
from tests.fakes.faults import Faults
from tests.fakes.states import write_states
from tests.recipes import finish_prompts

LAYERS = (1, 2, NUM_LAYERS)
IN_FLIGHT = 4
PROOF = 16
"""Requests of a proof, which come before all others: eight samples together and each alone."""
PER_SHARD = 10
FACTS = {
    "model_fingerprint": "m" * 64,
    "num_layers": NUM_LAYERS,
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "max_context": 2048,
}


def make_lineage(
    folder: Path,
    samples: list[list[Sample]] | None = None,
    *,
    facts: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    storage: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    **extraction: Any,
) -> Lineage:
    """A recipe with one shard for each list of `samples` (default: two of PER_SHARD), which are made."""
    shards = samples or [[invent(shard, index) for index in range(PER_SHARD)] for shard in (0, 1)]
    (folder / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    source = {"path": str(folder / "prompts.jsonl")}
    settings = {"layers": LAYERS, "concurrency": IN_FLIGHT, "max_sample_tokens": 64, "part_gib": 1e-6}
    target = FACTS | {"model_path": str(make_target(folder / "target"))} | (facts or {})
    values: dict[str, Any] = {
        "name": "tiny",
        "target": {"path": str(target["model_path"])},
        "prompts": {"sources": [source], "count": PER_SHARD * len(shards), "per_shard": PER_SHARD},
        "extraction": settings | extraction,
        "evaluation": {"sets": [{"name": "own", **source}]},
        "server": {"extraction": {"max_model_len": 64} | (server or {})},
        "storage": storage or {},
        "generation": generation or {},
    }
    lineage = Lineage(Recipe.model_validate(values), folder / "storage")
    place = lineage.target_model()
    place.folder.mkdir(parents=True)
    place.finish([], target)
    finish_prompts(lineage)
    for shard, listed in zip(lineage.recipe.shards, shards, strict=True):
        make_samples(lineage, shard, listed)
    return lineage


def make_samples(lineage: Lineage, shard: str, samples: list[Sample]) -> None:
    place = lineage.synthetic_samples(shard)
    place.folder.mkdir(parents=True)
    write_samples(place.folder / SAMPLES_NAME, samples)
    tokens = {
        "prompt_tokens": sum(len(sample.prompt_token_ids) for sample in samples),
        "completion_tokens": sum(len(sample.completion_token_ids) for sample in samples),
    }
    place.finish([place.folder / SAMPLES_NAME], {"samples": len(samples), **tokens})


def audit(lineage: Lineage) -> Lineage:
    place = lineage.sample_audit()
    place.folder.mkdir(parents=True)
    place.finish([], {})
    return lineage


def invent(shard: int, index: int, **changes: Any) -> Sample:
    """Sample `index` of a shard: other ids and another length for each."""
    first = 100 * shard + index
    values: dict[str, Any] = {
        "sample_id": f"{first}-t0",
        "prompt_id": str(first),
        "turn": 0,
        "prompt_token_ids": [1, first, 3],
        "completion_token_ids": list(range(10, 15 + index)),
        "finish_reason": "stop",
        "content": "",
        "reasoning": "",
        "usage": {},
        "sampling": {},
        "server": "s" * 64,
        "verdict": "good",
    }
    return Sample(**(values | changes))


@dataclass
class StandIn:
    """The extraction server of a test.

    `on_request(number, ids)` may return a status instead of states, or the faults of these states.
    """

    staging: Path = Path()
    faults: Faults = field(default_factory=Faults)
    on_request: Callable[[int, list[int]], int | Faults | None] = lambda number, ids: None
    requests: list[list[int]] = field(default_factory=list)
    opened: int = 0
    starts: int = 0
    """Number of the start that each opening is attached to; by default each opening starts a server."""
    dead: bool = False
    most_in_flight: int = 0
    _in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check_alive(self) -> None:
        if self.dead:
            raise ServerDied("the process ended. Last lines of its log: ...")

    def answer(self, ids: list[int]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            number = len(self.requests)
            self.requests.append(ids)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            answer = self.on_request(number, ids)
            if self.dead:
                raise ConnectionError
            if isinstance(answer, int):
                return answer, {"error": {"message": "as the test wants it"}}
            path = self.staging / f"cmpl-{number}-0.safetensors"
            write_states(path, ids, LAYERS, HIDDEN, TARGET, answer or self.faults)
            return 200, {"kv_transfer_params": {"hidden_states_path": str(path)}}
        finally:
            with self._lock:
                self._in_flight -= 1

    @contextlib.contextmanager
    def open(self, staging: Path) -> Iterator[Any]:
        """What the step is given: a server that leaves its files in `staging`."""
        self.staging = staging
        self.opened += 1
        self.requests.clear()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert (body["max_tokens"], body["temperature"], body["model"]) == (1, 0, "eagle3-x")
                try:
                    status, answer = stand_in.answer(body["prompt"])
                except ConnectionError:
                    self.close_connection = True
                    return
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                log = staging.parent / f"server-{self.starts or time.time_ns()}.log"
                address = f"http://127.0.0.1:{server.server_port}"
                yield _Running(address, "eagle3-x", self.check_alive, log)
            finally:
                server.shutdown()
                thread.join()


@dataclass(frozen=True)
class _Running:
    base_url: str
    model: str
    check_alive: Callable[[], None]
    log: Path
