"""The environment of processes that are started here: without the secrets, of which they need none.

Servers and training take folders, so nothing but what downloads and publishes asks the hub; that happens in a
step's own process. A secret in a child would be readable by whoever may look at that process, and by all that
a model's own code does where `trust_remote_code` is set.
"""

import re
from collections.abc import Mapping

_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|WEBHOOK|(API|ACCESS|PRIVATE)_KEY|ACCESS_KEY_ID|PG_URL)$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret, as `HF_TOKEN` and `AWS_SECRET_ACCESS_KEY` do."""
    return _SECRET.search(name) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """All else of an environment, for a child."""
    return {name: value for name, value in environment.items() if not is_secret(name)}
