"""Is the draft's folder what was trained, whole, and what vLLM serves as it was trained?

    draft_config.py    its config says what it was trained with
    draft_tensors.py   its tensors are those of the layout, with sound values
    borrowed.py        what it took over from the target is the target's

That the files are the ones which training wrote is compared by their checksums (release.py).
"""

import json
from pathlib import Path

from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.release.borrowed import borrowed_problems
from eagle3_pipeline.release.draft_config import config_problems
from eagle3_pipeline.release.draft_tensors import tensor_problems
from eagle3_pipeline.release.expected import Expected


def verify_draft(folder: Path, expected: Expected) -> None:
    """Raise DamagedFile with all that is wrong with the draft in `folder`; MissingInput if there is none."""
    config_path = folder / "config.json"
    weights = sorted(folder.glob("*.safetensors"))
    if not config_path.is_file() or not weights:
        raise MissingInput(
            f"{folder} has no config.json or no *.safetensors. Materialise draft_checkpoint again."
        )
    try:
        config = json.loads(config_path.read_text())
    except ValueError as error:
        raise DamagedFile(
            f"{config_path} is not JSON ({error}). Materialise draft_checkpoint again."
        ) from error
    tensors = list(tensor_problems(weights, config, expected))
    # Values are compared where there is something to compare.
    borrowed = [] if tensors else borrowed_problems(folder, expected)
    if problems := [*config_problems(config, expected), *tensors, *borrowed]:
        raise DamagedFile(
            f"the draft in {folder} is not what was trained for this target, and is not released:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nA training of another version may have written it: materialise draft_checkpoint again."
        )
