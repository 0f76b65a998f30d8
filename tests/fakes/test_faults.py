"""Each fault of the stand-in does what its name says."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.faults import write_control
from tests.fakes.log import read_log
from tests.fakes.process import StandIn, stand_in
from tests.fakes.record import chat, extraction_flags
from tests.recipes import distinct_prompts


def answer(server: StandIn, text: str = "What is a canal?", **changes: Any) -> httpx.Response:
    return server.client.post("/v1/chat/completions", json=chat(text, **changes))


def test_the_same_prompt_gets_the_same_answer_from_another_process(tmp_path: Path, tiny_llama: Path) -> None:
    answers = []
    for name in ("a", "b"):
        with stand_in(tmp_path / name, tiny_llama) as server:
            answers.append(answer(server).json()["choices"][0]["token_ids"])
    assert answers[0] == answers[1]


def test_a_crash_at_the_start_leaves_its_text_and_status(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, ready=False, crash_log="CUDA out of memory", crash_exit=3) as server:
        assert server.process.wait(20) == 3
        assert "CUDA out of memory" in server.log.read_text()


def test_a_loading_server_answers_nothing_until_it_is_ready(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, ready=False, load_seconds=60) as server:
        deadline = time.monotonic() + 20
        while "non-default args" not in server.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(httpx.ConnectError):
            server.client.get("/health")
        assert server.process.poll() is None


def test_a_stop_ends_with_status_0_and_takes_the_children_along(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, children=2) as server:
        children = psutil.Process(server.process.pid).children()
        assert len(children) == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert not any(child.is_running() for child in children)
    assert [one["event"] for one in read_log(server.requests)] == ["start", "stop"]


def test_death_after_n_requests_leaves_the_children_behind(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, children=1, die_after_requests=2) as server:
        children = psutil.Process(server.process.pid).children()
        assert [answer(server).status_code for _ in range(2)] == [200, 200]
        with pytest.raises(httpx.TransportError):
            answer(server)
        assert server.process.wait(20) == 1
        assert children[0].is_running()
        children[0].kill()
    assert len(read_log(server.requests, "request")) == 3
    assert len(read_log(server.requests, "answer")) == 2


def test_a_dead_engine_gives_500_and_then_the_server_stops(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, engine_dies_after_requests=1) as server:
        assert answer(server).status_code == 200
        assert answer(server).status_code == 500
        assert server.client.get("/health").status_code == 503
        server.process.wait(20)
        assert "EngineDeadError" in server.log.read_text()


def test_it_dies_at_the_signal_that_was_named(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, die_signal="SIGUSR1") as server:
        server.process.send_signal(signal.SIGUSR1)
        assert server.process.wait(20) == 1


def test_it_can_ignore_the_request_to_stop(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, ignore_sigterm=True) as server:
        server.process.send_signal(signal.SIGTERM)
        assert answer(server).status_code == 200
        assert server.process.poll() is None


def test_a_hanging_server_is_healthy_and_gives_no_tokens(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, hang_after_requests=1) as server:
        assert answer(server).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            server.client.post("/v1/chat/completions", json=chat("Why?"), timeout=0.3)
        assert server.client.get("/health").status_code == 200


def test_the_first_requests_are_sent_away_with_the_time_to_come_back(
    tmp_path: Path, tiny_llama: Path
) -> None:
    with stand_in(tmp_path, tiny_llama, busy_requests=1, busy_status=429, retry_after="7") as server:
        first, second = answer(server), answer(server)
    assert (first.status_code, first.headers["retry-after"]) == (429, "7")
    assert second.status_code == 200


def test_a_marked_prompt_is_refused_and_the_control_file_changes_that_at_once(
    tmp_path: Path, tiny_llama: Path
) -> None:
    with stand_in(tmp_path, tiny_llama, refuse_marker="canal") as server:
        assert answer(server).status_code == 400
        write_control(server.control, refuse_marker="river")
        assert answer(server).status_code == 200
        write_control(server.control)
        assert answer(server).status_code == 400


def test_shares_hit_that_part_of_the_prompts(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, truncated_share=0.5) as server:
        reasons = [
            answer(server, text).json()["choices"][0]["finish_reason"]
            for text in distinct_prompts(40, seed=3)
        ]
    assert 10 <= reasons.count("length") <= 30
    assert reasons.count("stop") == 40 - reasons.count("length")


@pytest.mark.parametrize(("fault", "ids"), [("empty_share", [4]), ("degenerate_share", None)])
def test_answers_can_be_empty_or_repeat_themselves(
    fault: str, ids: list[int] | None, tmp_path: Path, tiny_llama: Path
) -> None:
    with stand_in(tmp_path, tiny_llama, **{fault: 1.0}) as server:
        choice = answer(server).json()["choices"][0]
    if ids is not None:
        assert choice["token_ids"] == ids
        assert choice["content"] if "content" in choice else not choice["message"]["content"]
    else:
        assert choice["finish_reason"] == "length"
        assert len(set(choice["token_ids"])) == 3


def test_thoughts_are_split_off_and_a_cut_thought_has_no_content(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, "--reasoning-parser", "qwen3") as server:
        whole = answer(server).json()["choices"][0]["message"]
        cut = answer(server, max_completion_tokens=3).json()["choices"][0]["message"]
        write_control(server.control, no_reasoning=True)
        none = answer(server).json()["choices"][0]["message"]
    assert whole["content"]
    assert whole["reasoning"]
    assert cut["content"] is None
    assert cut["reasoning"]
    assert none["content"]
    assert none["reasoning"] is None


def test_lengths_can_have_a_long_tail(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, long_tail=True, mean_tokens=40) as server:
        sizes = [
            answer(server, text, max_completion_tokens=1000).json()["usage"]["completion_tokens"]
            for text in distinct_prompts(60, seed=4)
        ]
    assert max(sizes) > 3 * sorted(sizes)[30]


def test_a_draft_is_counted_by_position_and_engine(tmp_path: Path, tiny_llama: Path) -> None:
    config = '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 2}'
    flags = ("--speculative_config", config, "--data-parallel-size", "2")
    with stand_in(tmp_path, tiny_llama, *flags, acceptance=0.7) as server:
        tokens = sum(
            answer(server, text).json()["usage"]["completion_tokens"] for text in distinct_prompts(20, seed=5)
        )
        text = server.client.get("/metrics").text
    sums: dict[str, float] = {}
    engines = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name + sample.labels.get("position", "")
            sums[key] = sums.get(key, 0) + sample.value
            engines.add(sample.labels.get("engine"))
    assert {"0", "1"} <= engines
    assert sums["vllm:generation_tokens_total"] == tokens
    drafts, accepted = (
        sums["vllm:spec_decode_num_drafts_total"],
        sums["vllm:spec_decode_num_accepted_tokens_total"],
    )
    first, second = (
        sums[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{position}"] for position in (0, 1)
    )
    assert sums["vllm:spec_decode_num_draft_tokens_total"] == 2 * drafts
    assert first + second == accepted
    assert 0.6 < first / drafts < 0.8
    assert 0.6 < second / first < 0.8


def test_states_can_be_torn_not_finite_short_late_or_missing(tmp_path: Path, tiny_llama: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    staging = tmp_path / "staging"
    staging.mkdir()
    body = {"model": "eagle3-recorded", "prompt": [0, 1, 300, 4, 2], "max_tokens": 1}
    with stand_in(tmp_path, tiny_llama, *extraction_flags(staging)) as server:

        def capture(**faults: Any) -> Path:
            write_control(server.control, **faults)
            reply = server.client.post("/v1/completions", json=body).json()
            path = Path(reply["kv_transfer_params"]["hidden_states_path"])
            deadline = time.monotonic() + 5
            while not faults.get("no_states_share") and not path.exists() and time.monotonic() < deadline:
                if path.with_name(path.name + ".no-room").exists():
                    break
                time.sleep(0.01)
            return path

        assert load_file(capture())["hidden_states"].isfinite().all()
        with pytest.raises(SafetensorError):
            load_file(capture(torn_share=1.0))
        assert load_file(capture(nan_share=1.0))["hidden_states"].isnan().any()
        assert len(load_file(capture(short_share=1.0))["hidden_states"]) == 4
        assert load_file(capture(wrong_ids_share=1.0))["token_ids"].tolist() != body["prompt"]
        started = time.monotonic()
        assert capture(late_states_seconds=0.3).exists()
        assert time.monotonic() - started >= 0.3
        assert not capture(no_states_share=1.0).exists()
        full = capture(no_room_after=0)
        assert full.with_name(full.name + ".no-room").exists()


def test_it_starts_from_any_folder_and_other_commands_reach_the_real_python(tmp_path: Path) -> None:
    import subprocess

    from tests.recipes import FAKE_PYTHON

    asked = subprocess.run(
        [FAKE_PYTHON, "-c", "import sys; print(sys.version_info[0])"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert asked.stdout.strip() == "3"
    assert os.access(FAKE_PYTHON, os.X_OK)
