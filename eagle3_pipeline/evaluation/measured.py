"""What an acceptance report was measured on: target, draft, sets, server, machine, versions.

Names and hashes, never a folder of this machine or a secret: a page is passed on.
"""

from typing import Any

from eagle3_pipeline.lineage import Lineage


def measured(lineage: Lineage) -> dict[str, Any]:
    """The report's `measured`, as JSON values; to be called on the machine that measured."""
    raise NotImplementedError
