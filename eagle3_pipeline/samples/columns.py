"""The columns of a file of samples: name, type and meaning of each, in order.

They are the fields of Sample. Ids are `list<int32>`; `usage` and `sampling` are JSON text, so that a new
count or setting is no new column type. What a column means is the text below its field.
"""

import ast
import inspect
from dataclasses import dataclass, fields
from functools import cache

from eagle3_pipeline.samples.sample import Sample

TEXT, NUMBER, IDS = "string", "int32", "list<int32>"
JSON_COLUMNS = ("usage", "sampling")
_OTHER_THAN_TEXT = {"turn": NUMBER, "prompt_token_ids": IDS, "completion_token_ids": IDS}


@dataclass(frozen=True)
class Column:
    """One column; none of them has a row without a value."""

    name: str
    type: str
    meaning: str


@cache
def sample_columns() -> tuple[Column, ...]:
    """All columns, in the order of the file."""
    meanings = _meanings()
    names = [one.name for one in fields(Sample)]
    return tuple(Column(name, _OTHER_THAN_TEXT.get(name, TEXT), meanings[name]) for name in names)


def _meanings() -> dict[str, str]:
    """The text below each field of Sample, on one line; of JSON text it is said that it is."""
    (definition,) = ast.parse(inspect.getsource(Sample)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for before, after in zip(definition.body, definition.body[1:], strict=False):
        match before, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split()) + (" JSON." if name in JSON_COLUMNS else "")
    return found
