"""Writes docs/settings.md from the recipe's schema: `python docs/settings.py > docs/settings.md`."""

import sys
from typing import Any

from eagle3_pipeline.recipe import Recipe

INTRODUCTION = """# Every setting of a recipe

A recipe is one YAML file in `recipes/`, or in `recipes/local/`, which is not under version control and takes
precedence. `extends: other.yaml` starts from another recipe and changes single settings. Relative paths are
relative to the file they stand in. Unknown keys, wrong types and contradictions are refused when the recipe
is read, with the place and the valid values.

`server` has the blocks `common`, `generation`, `extraction` and `evaluation`, all of the same settings:
`common` holds for the three phases, a phase's own block changes single settings.
"""


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        kinds = [_type(option) for option in field["anyOf"]]
        return " or ".join(kind for kind in kinds if kind != "null")
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array" and "$ref" in field.get("items", {}):
        return f"list of {_type(field['items'])}"
    kind = {"array": "list", "number": "number", "integer": "integer", "object": "mapping"}.get(
        field.get("type", ""), field.get("type", "any")
    )
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[name]:g}" for name, sign in bounds.items() if name in field]
    return f"{kind} {', '.join(limits)}".strip()


def _default(name: str, block: dict[str, Any], field: dict[str, Any]) -> str:
    if name in block.get("required", []):
        return "*required*"
    default = field.get("default")
    return "" if isinstance(default, dict) else "" if default is None else f"`{default}`"


def _meaning(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A block without a text of its own says what its class says."""
    reference = next((one["$ref"] for one in [field, *field.get("anyOf", [])] if "$ref" in one), "")
    return " ".join(definitions[reference.rsplit("/", 1)[-1]]["description"].split("\n")[0].split())


def _table(block: dict[str, Any], definitions: dict[str, Any]) -> list[str]:
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name, field in block["properties"].items():
        meaning = " ".join(field.get("description", "").split()) or _meaning(field, definitions)
        kind = _type(field).replace("|", "\\|")
        lines.append(f"| `{name}` | {kind} | {_default(name, block, field)} | {meaning} |")
    return lines


def settings_page() -> str:
    """The whole page as Markdown."""
    schema = Recipe.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    lines = [INTRODUCTION, "## Recipe", "", *_table(schema, definitions)]
    for name, block in sorted(definitions.items()):
        first = " ".join(block.get("description", "").split())
        lines += ["", f"## {name}", "", first, "", *_table(block, definitions)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(settings_page())
