from pathlib import Path

import pytest

from eagle3_pipeline.errors import ServerStalled
from eagle3_pipeline.serving.metrics import ServerMetrics, parse_metrics, scrape

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 3.0
vllm:num_requests_running{{engine="1",model_name="m"}} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 1.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.5
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0",model_name="m"}} 4.0
vllm:num_preemptions_created{{engine="0",model_name="m"}} 1.79e+09
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} 1000.0
vllm:generation_tokens_total{{engine="1",model_name="m"}} 500.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} 70.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 100.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} 600.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="1",model_name="m",position="0"}} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} 20.0
"""


def test_counters_are_summed_over_engines() -> None:
    metrics = parse_metrics(TEXT.format(drafts=100.0, accepted=80.0, first=50.0))
    assert metrics == ServerMetrics(
        running=5,
        waiting=1,
        kv_cache_usage=0.5,
        generation_tokens=1500,
        prompt_tokens=70,
        preemptions=4,
        drafts=200,
        draft_tokens=600,
        accepted_tokens=80,
        accepted_per_position=(60, 20),
    )


def test_a_difference_leaves_out_what_was_counted_before_and_keeps_the_state_of_now() -> None:
    before = parse_metrics(TEXT.format(drafts=100.0, accepted=80.0, first=50.0))
    after = parse_metrics(TEXT.format(drafts=150.0, accepted=110.0, first=80.0))
    during = after - before
    assert (during.drafts, during.accepted_tokens, during.accepted_per_position) == (50, 30, (30, 0))
    assert (during.running, during.generation_tokens) == (5, 0)
    assert (after - parse_metrics("")) == after


def test_a_server_without_drafts_counts_none() -> None:
    assert parse_metrics("").accepted_per_position == ()


def test_the_counters_of_the_real_server_are_found_among_its_six_hundred_lines() -> None:
    recorded = Path(__file__).parents[1] / "fakes" / "recorded" / "metrics.txt"
    metrics = parse_metrics(recorded.read_text())
    assert (metrics.generation_tokens, metrics.prompt_tokens) == (51, 70)
    assert (metrics.running, metrics.waiting, metrics.preemptions) == (0, 0, 0)


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(ServerStalled, match=r"http://127\.0\.0\.1:9/metrics gave no counters"):
        scrape("http://127.0.0.1:9")
