"""The records of servers as they lie on disk, dead ones included; reading them elsewhere tidies them up."""

from eagle3_pipeline.serving.host_state import state_root
from eagle3_pipeline.serving.process import boot_id
from eagle3_pipeline.serving.record import ServerRecord, read_record


def records() -> list[ServerRecord]:
    """The records of this boot, of all users and containers; none where no server was ever started."""
    found = (read_record(path) for path in sorted((state_root() / "servers").glob("*.json")))
    return [record for record in found if record is not None and record.boot_id == boot_id()]
