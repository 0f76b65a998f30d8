"""The draft once more, in the layout of the EAGLE-3 authors, which SGLang and SpecForge load.

    eagle3/
        config.json         flat: one Llama layer, draft_vocab_size, eagle_config
        model.safetensors   bfloat16: fc, midlayer.*, norm, lm_head; d2t and t2d as in the draft

The same values as in the draft's own folder (training/export.py), bit for bit; what differs:

    layers.0.*       is midlayer.*
    embed_tokens     is left out: SGLang and SpecForge take the target's, whatever is there
    layer ids        in eagle_config by what leaves a layer, as SGLang and SpecForge count (one less than here);
                     beside the rest by what enters it, where vLLM looks first
    rotary settings  as rope_theta and rope_scaling (transformers 4), and as rope_parameters (transformers 5)

The layout has one architecture. What else a draft may have stands in none of its keys, or in keys that some
versions of SGLang and SpecForge pass over in silence: such a draft would be served, and next to never accepted.
So it is not written in this layout.

Sources: SafeAILab/EAGLE, eagle/model/cnets.py. sgl-project/sglang, srt/models/llama_eagle3.py and pull request
25454. sgl-project/SpecForge, specforge/modeling/draft/llama3_eagle.py.
"""

from pathlib import Path


def write_eagle3_layout(draft: Path, target: Path, folder: Path, verifier: str) -> list[Path] | str:
    """Write the draft in `draft` (the released layout, verified) to `folder`; returns its two files.

    Where the layout cannot express the draft nothing is written, and the return is why, as the end of a
    sentence ("there is no eagle3/, because ..."). `target` is the target's folder, `verifier` the name under
    which the config speaks of it: its public id, or the name of its folder, never a path.

    What a kill leaves is written over by the next call. Raises NotEnoughRoom, MissingInput (no target) and
    DamagedFile (what is read back is not what was written); nothing is left then.
    """
    raise NotImplementedError
