"""Messages to people, where the environment of the daemon says how to reach them; nowhere by default.

    EAGLE3_SLACK_WEBHOOK    address of an incoming webhook of Slack, or of what takes the same {"text": ...}
    EAGLE3_MAIL_TO          addresses, separated by commas; wants EAGLE3_MAIL_HOST
    EAGLE3_MAIL_HOST        SMTP server with TLS: HOST or HOST:PORT (465)
    EAGLE3_MAIL_FROM        sender, also the name to log in with; by default the first of EAGLE3_MAIL_TO
    EAGLE3_MAIL_PASSWORD    where the server wants one
    EAGLE3_UI_URL           address of the web UI as people reach it, for links

The webhook and the password are secrets: they are read from the environment alone and never shown.
"""

import os
import smtplib
import ssl
from email.message import EmailMessage

SLACK_VARIABLE, MAIL_VARIABLE = "EAGLE3_SLACK_WEBHOOK", "EAGLE3_MAIL_TO"
_TIMEOUT_S = 20.0
_SMTPS_PORT = 465


def is_configured() -> bool:
    """Whether a message would reach anybody."""
    return bool(os.environ.get(SLACK_VARIABLE) or os.environ.get(MAIL_VARIABLE))


def send(subject: str, text: str) -> None:
    """Send a message every way that is configured.

    Raises RuntimeError with each way that failed, after the others were tried; the webhook's address and the
    password are not in it.
    """
    ways = {SLACK_VARIABLE: _to_slack, MAIL_VARIABLE: _by_mail}
    failed = []
    for variable, way in ways.items():
        if os.environ.get(variable):
            try:
                way(subject, text)
            except Exception as error:  # of httpx and smtplib; their words may quote the address
                failed.append(f"{variable}: {type(error).__name__}")
    if failed:
        raise RuntimeError(f"a message was not sent ({', '.join(failed)}): {subject}")


def link(path: str) -> str:
    """A line with the address of a page of the web UI, or nothing where that is not known."""
    base = os.environ.get("EAGLE3_UI_URL", "").rstrip("/")
    return f"\n{base}/{path}" if base else ""


def _to_slack(subject: str, text: str) -> None:
    import httpx

    message = f"{subject}\n{text}"
    # All that Slack's markup begins with: text of a model or of a log must not call people or make links.
    for sign, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        message = message.replace(sign, escaped)
    httpx.post(os.environ[SLACK_VARIABLE], json={"text": message}, timeout=_TIMEOUT_S).raise_for_status()


def _by_mail(subject: str, text: str) -> None:
    receivers = [one.strip() for one in os.environ[MAIL_VARIABLE].split(",") if one.strip()]
    message = EmailMessage()
    message["Subject"] = " ".join(subject.split())
    message["From"] = os.environ.get("EAGLE3_MAIL_FROM") or receivers[0]
    message["To"] = ", ".join(receivers)
    message.set_content(text)
    host, _, port = os.environ["EAGLE3_MAIL_HOST"].partition(":")
    trusted = ssl.create_default_context()
    with smtplib.SMTP_SSL(host, int(port or _SMTPS_PORT), timeout=_TIMEOUT_S, context=trusted) as server:
        if password := os.environ.get("EAGLE3_MAIL_PASSWORD"):
            server.login(message["From"], password)
        server.send_message(message)
