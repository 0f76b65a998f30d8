"""The released folder on a server: does it speculate there as the report says?

The folder has the checkpoint's bytes and a config that was checked, and still a server may not run them as
they were measured: another vLLM, a file that it reads and nobody checked. So it is served once, and answers
the first evaluation set again, with the report's settings but as many requests at once as any server takes.
"""

from typing import TYPE_CHECKING, Any

from eagle3_pipeline.lineage import Lineage

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer


def smoke(lineage: Lineage, server: "RunningServer") -> dict[str, Any]:
    """Ask `server`, which serves the target with the released folder as its draft, and compare.

    Returns facts for the manifest: `set`, `prompts`, `drafts`, `position_0`, `acceptance_length`, those of
    the report with `reported_` before them, and `standard_errors`, how far position 0 is from the report's.

    Raises QualityError (no drafts, another number of speculative tokens, another acceptance than the
    report's), Busy (somebody else used the server), MissingInput (no report), ServerDied and ServerError.
    """
    raise NotImplementedError
