"""A server's own counters, read from its /metrics.

Counters are summed over engines (data-parallel replicas) and count from the server's start: the numbers of a
measurement are a difference, `after - before`, which leaves out the warm-up (failure case C59).
"""

import ssl
from collections import defaultdict
from dataclasses import dataclass
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from eagle3_pipeline.errors import ServerStalled

_TIMEOUT = httpx.Timeout(10.0, connect=2.0)
# An address of this machine, without TLS: the certificates that httpx loads by default take 20 ms each time.
_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

_POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_USAGE = "vllm:kv_cache_usage_perc"
_SUMS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}
# The server has some 650 lines, mostly buckets of histograms; parsing all of them takes 8 ms.
_USED = tuple(f"{name}{end}" for name in (_POSITIONS, _USAGE, *_SUMS) for end in ("{", " "))


@dataclass(frozen=True)
class ServerMetrics:
    """Counters since the server's start, or between two moments. `drafts` = times that the draft proposed.

    `accepted_per_position[i]` counts drafts whose token i (from 0) was accepted, so the acceptance length is
    1 + sum(accepted_per_position) / drafts.
    """

    running: int
    """Requests being worked on now."""
    waiting: int
    """Requests queued now."""
    kv_cache_usage: float
    """Used share of the KV cache now, 0 to 1; the fullest engine's."""
    generation_tokens: int
    prompt_tokens: int
    preemptions: int
    """Times that a request lost its KV cache to others and is computed again."""
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    def __sub__(self, earlier: Self) -> Self:
        """What was counted since `earlier`; running, waiting and kv_cache_usage stay those of now."""
        before = (*earlier.accepted_per_position, *[0] * len(self.accepted_per_position))
        return type(self)(
            running=self.running,
            waiting=self.waiting,
            kv_cache_usage=self.kv_cache_usage,
            generation_tokens=self.generation_tokens - earlier.generation_tokens,
            prompt_tokens=self.prompt_tokens - earlier.prompt_tokens,
            preemptions=self.preemptions - earlier.preemptions,
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_tokens=self.accepted_tokens - earlier.accepted_tokens,
            accepted_per_position=tuple(
                count - before[position] for position, count in enumerate(self.accepted_per_position)
            ),
        )


def scrape(base_url: str) -> ServerMetrics:
    """The counters now of the server at `base_url` (without /v1); raises ServerStalled without an answer."""
    try:
        reply = httpx.get(
            f"{base_url}/metrics", timeout=_TIMEOUT, trust_env=False, verify=_NO_CERTIFICATES
        ).raise_for_status()
        return parse_metrics(reply.text)
    except (httpx.HTTPError, ValueError) as error:
        raise ServerStalled(
            f"{base_url}/metrics gave no counters ({type(error).__name__}: {error}). Is the server alive?"
        ) from error


def parse_metrics(text: str) -> ServerMetrics:
    """Counters from the Prometheus text format, as vLLM 0.32 names them; what is not there counts as 0."""
    sums: defaultdict[str, float] = defaultdict(float)
    positions: defaultdict[int, float] = defaultdict(float)
    fullest = 0.0
    used = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_USED))
    for family in text_string_to_metric_families(used):
        for sample in family.samples:
            if sample.name == _POSITIONS:
                positions[int(sample.labels["position"])] += sample.value
            elif sample.name == _USAGE:
                fullest = max(fullest, sample.value)
            else:
                sums[sample.name] += sample.value
    return ServerMetrics(
        kv_cache_usage=fullest,
        accepted_per_position=tuple(
            int(positions[position]) for position in range(max(positions, default=-1) + 1)
        ),
        **{field: int(sums[name]) for name, field in _SUMS.items()},
    )
