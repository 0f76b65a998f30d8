"""Who holds which GPUs of this machine."""

from collections.abc import Iterator

from eagle3_pipeline.doctor.finding import Finding, note, ok
from eagle3_pipeline.serving.holders import Holder
from eagle3_pipeline.serving.host_state import state_root
from eagle3_pipeline.serving.lease import all_holders
from eagle3_pipeline.serving.overview import leases_in_words


def leases() -> Iterator[Finding]:
    """A line per lease that is held."""
    found = held()
    for words in leases_in_words(found):
        yield note(words, "Steps that want it wait for that. To free it, stop the run.")
    if not found:
        yield ok("leases: nobody holds a GPU or the CPU")


def held() -> list[Holder]:
    """Who holds any lease; looking makes no folder where none was ever taken."""
    return all_holders() if (state_root() / "leases").is_dir() else []
