"""Messages to people: of failed runs and of a disk that fills, each once, over real sockets."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from sensors import messages
from tests.location.runs import tick_sensor

WEBHOOK = "EAGLE3_SLACK_WEBHOOK"


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Texts that a webhook got; its address is in the environment."""
    texts: list[str] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            texts.append(body["text"])
            self.send_response(500 if "refuse" in body["text"] else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Webhook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(WEBHOOK, f"http://127.0.0.1:{server.server_port}/secret")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield texts
        server.shutdown()


def _tell(load, instance: dg.DagsterInstance, failing: str) -> dg.SkipReason | None:
    """Let a job of one step fail with these words, and the sensor hear of it."""

    @dg.op
    def tiny__prompts() -> None:
        raise dg.Failure(failing)

    @dg.job
    def tiny_pipeline() -> None:
        tiny__prompts()

    result = tiny_pipeline.execute_in_process(instance=instance, raise_on_error=False)
    context = dg.build_run_status_sensor_context(
        "failures", result.get_run_failure_event(), instance, result.dagster_run
    ).for_run_failure()
    return load("smollm2-cpu").resolve_sensor_def("failures")(context)


def test_nobody_is_told_by_default(load, instance) -> None:
    said = _tell(load, instance, "no room")
    assert isinstance(said, dg.SkipReason)
    assert said.skip_message == (
        "nobody is told: the environment has neither EAGLE3_SLACK_WEBHOOK nor EAGLE3_MAIL_TO"
    )


def test_a_failed_run_is_told_with_its_step_its_reason_and_a_link(
    load, instance, received, monkeypatch
) -> None:
    monkeypatch.setenv("EAGLE3_UI_URL", "http://gpu-1:3000/")
    _tell(load, instance, "BadInput: a <!channel> & <http://evil|link>")
    (text,) = received
    (run,) = instance.get_runs()
    assert text == (
        f"tiny_pipeline failed (run {run.run_id[:8]})\n"
        "prompts: BadInput: a &lt;!channel&gt; &amp; &lt;http://evil|link&gt;\n"
        f"http://gpu-1:3000/runs/{run.run_id}"
    )


def test_a_long_reason_is_cut(load, instance, received) -> None:
    _tell(load, instance, "x" * 5000)
    assert len(received[0]) < 1200
    assert received[0].endswith("x ...")


def test_a_message_that_cannot_be_sent_is_an_error_without_the_secret(received) -> None:
    with pytest.raises(RuntimeError, match=f"{WEBHOOK}: HTTPStatusError") as failure:
        messages.send("refuse", "this")
    assert "secret" not in str(failure.value)


def test_mail_goes_to_all_receivers_over_tls_with_the_password_of_the_environment(monkeypatch) -> None:
    sent: list[tuple[Any, ...]] = []

    class Server:
        def __init__(self, host: str, port: int, *, timeout: float, context: Any) -> None:
            assert context.check_hostname
            sent.append((host, port))

        def __enter__(self) -> "Server":
            return self

        def __exit__(self, *_: object) -> None:
            """Closed."""

        def login(self, name: str, password: str) -> None:
            sent.append((name, password))

        def send_message(self, message: Any) -> None:
            sent.append((message["From"], message["To"], message["Subject"], message.get_content().strip()))

    monkeypatch.setattr(messages.smtplib, "SMTP_SSL", Server)
    monkeypatch.setenv("EAGLE3_MAIL_TO", "a@x.org, b@x.org")
    monkeypatch.setenv("EAGLE3_MAIL_HOST", "mail.x.org:4650")
    messages.send("a\nb", "text")
    monkeypatch.setenv("EAGLE3_MAIL_FROM", "me@x.org")
    monkeypatch.setenv("EAGLE3_MAIL_PASSWORD", "pass")
    messages.send("a", "text")
    assert sent == [
        ("mail.x.org", 4650),
        ("a@x.org", "a@x.org, b@x.org", "a b", "text"),
        ("mail.x.org", 4650),
        ("me@x.org", "pass"),
        ("me@x.org", "a@x.org, b@x.org", "a", "text"),
    ]


def test_a_disk_that_fills_is_told_once_and_again_after_there_was_room(
    load, instance, received, monkeypatch, tmp_path: Path
) -> None:
    definitions = load("smollm2-cpu")
    cursor: str | None = None
    seen = []
    for free_gib in (50, 0.5, 0.4, 50, 0.1):
        usage = type("Usage", (), {"total": 100 * 2**30, "free": int(free_gib * 2**30)})
        monkeypatch.setattr("sensors.disk.shutil.disk_usage", lambda _, found=usage: found)
        said = tick_sensor(definitions, instance, "disk", cursor)
        assert not said.run_requests
        cursor = said.cursor
        seen.append((len(received), "expected" in str(said.skip_message)))
    assert seen == [(0, False), (1, True), (1, True), (1, False), (2, True)]
    assert "0.5 of 100 GiB are free" in received[0]
    assert "NotEnoughRoom" in received[0]
