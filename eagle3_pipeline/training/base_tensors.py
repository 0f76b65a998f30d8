"""The tensors of a pretrained draft: listed without their values, renamed by rule, held against their places.

    midlayer.*              layers.0.*      the authors' and SpecForge's name of the one decoder layer
    model.*                 *               a wrapper that some exports have
    d2t, t2d                left out        the vocabulary map; vocabulary_map keeps it
    *.inv_freq, verifier_*  left out        computed from the config; the target's own

A tensor that finds no place, or a place that finds no tensor, is an error: a draft that is half loaded trains
without complaint, as if from scratch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.model_folder import weight_files

_WRAPPER = "model."
RENAMED = (("midlayer.", "layers.0."),)
_LEFT_OUT = ("d2t", "t2d")
_LEFT_OUT_ENDS = ("rotary_emb.inv_freq",)
_LEFT_OUT_BEGINNINGS = ("verifier_",)
_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class BaseTensor:
    """One weight of a base draft, by its name in speculators' draft."""

    file: Path
    found_as: str
    shape: tuple[int, ...]

    def read(self) -> Any:
        """Its values, as they are stored."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as weights:
            return weights.get_tensor(self.found_as)


def renamed(name: str) -> str:
    """A tensor's name in speculators' draft."""
    name = name.removeprefix(_WRAPPER)
    for old, new in RENAMED:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def list_tensors(base: Path) -> dict[str, BaseTensor]:
    """The weights of a draft folder; raises BadInput where two want one name, or one is no plain float."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, BaseTensor] = {}
    for path in weight_files(base):
        try:
            with safe_open(path, framework="pt") as weights:
                for found in weights.keys():  # noqa: SIM118 - it is no dict
                    if not _is_left_out(name := renamed(found)):
                        piece = weights.get_slice(found)
                        _require_float(base, found, piece.get_dtype())
                        if name in tensors:
                            raise BadInput(
                                f"the base draft {base} has two tensors for {name}: {tensors[name].found_as} "
                                f"and {found}. Take another base draft, or none."
                            )
                        tensors[name] = BaseTensor(path, found, tuple(piece.get_shape()))
        except SafetensorError as error:
            raise BadInput(f"{path} cannot be read ({error}): copy or download the draft again") from error
    return tensors


def require_fit(
    base: Path,
    tensors: Mapping[str, BaseTensor],
    places: Mapping[str, tuple[int, ...]],
    optional: frozenset[str],
) -> None:
    """Raise BadInput with all that does not fit; places in `optional` have the target's values otherwise."""
    missing = sorted(set(places) - set(tensors) - optional)
    strange = sorted(one.found_as for name, one in tensors.items() if name not in places)
    shapes = [
        f"{name} {list(tensors[name].shape)} for {list(place)}"
        for name, place in sorted(places.items())
        if name in tensors and tensors[name].shape != place
    ]
    if not (missing or strange or shapes):
        return
    what = "fits nowhere" if tensors and not set(tensors) & set(places) else "does not fit"
    raise BadInput(
        f"the base draft {base} {what}: missing {missing or 'nothing'}, unknown {strange or 'nothing'}, "
        f"other shapes {shapes or 'none'}. Known renamings: {dict(RENAMED)}. Take another base draft, or "
        "none."
    )


def _is_left_out(name: str) -> bool:
    return name in _LEFT_OUT or name.endswith(_LEFT_OUT_ENDS) or name.startswith(_LEFT_OUT_BEGINNINGS)


def _require_float(base: Path, name: str, dtype: str) -> None:
    if dtype not in _FLOATS:
        raise BadInput(
            f"the base draft {base} has {name} as {dtype}, expected one of {', '.join(_FLOATS)}: a quantized "
            "draft cannot be trained. Take the one that it was made from, or none."
        )
