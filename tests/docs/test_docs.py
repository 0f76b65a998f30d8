"""What the user guide claims, held against the code: settings, links, commands, variables, messages."""

import argparse
import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from eagle3_pipeline.cli import _parser
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.recipe.server import ServerSettings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WITH_README = [*PAGES, *(path for path in [ROOT / "README.md"] if path.is_file())]
# Where variables are read or set; tests have some of their own.
CODE = ("eagle3_pipeline", "assets", "resources", "sensors", "scripts", "deploy", "recipes")
CODE_FILES = ("definitions.py", "Makefile", "Dockerfile", "dagster.yaml", "workspace.yaml")
FILE_SUFFIXES = {"cfg", "json", "jsonl", "jinja", "lock", "log", "md", "parquet", "py", "safetensors", "yaml"}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _anchors(path: Path) -> set[str]:
    """Anchors as GitHub makes them: lower case, no punctuation, dashes for blanks, a number for a repeat."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def _links(path: Path) -> Iterator[str]:
    # A link's text may be code, so only fenced blocks are taken out.
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


def _code_text() -> str:
    files = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    files += [ROOT / name for name in CODE_FILES]
    readable = [path for path in files if path.suffix not in {".pyc", ".jsonl"}]
    return "\n".join(path.read_text(errors="ignore") for path in readable)


def _in_code(text: str) -> Iterator[str]:
    """Code of a page: fenced blocks line by line, and what stands in backticks."""
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def _leads_to_a_setting(parts: list[str]) -> bool:
    model: type[BaseModel] | None = Recipe
    for number, part in enumerate(parts):
        if number == 1 and parts[0] == "server" and part == "common":
            model = ServerSettings
            continue
        if model is None or part not in model.model_fields:
            return False
        model = _model_in(model.model_fields[part].annotation)
    return True


def _model_in(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _settings_named(text: str) -> Iterator[str]:
    for code in re.findall(r"`([a-z0-9_]+(?:\.[a-z0-9_]+)+)`", text):
        parts = code.split(".")
        if parts[0] in Recipe.model_fields and parts[-1] not in FILE_SUFFIXES:
            yield code


def _messages() -> str:
    """All texts in the code, with a blank line for what an f-string puts in, and the set-up script."""
    texts = [(ROOT / "scripts" / "setup.sh").read_text()]
    for path in sorted((ROOT / "eagle3_pipeline").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(one.value) if isinstance(one, ast.Constant) else "\n\n" for one in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n\n".join(texts)


def _subcommands() -> dict[str, argparse.ArgumentParser]:
    (action,) = [one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction)]
    return dict(action.choices)


def _settings_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("settings_page", DOCS / "settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_is_what_the_schema_says() -> None:
    assert (DOCS / "settings.md").read_text() == _settings_module().settings_page(), (
        "docs/settings.md is out of date: python docs/settings.py > docs/settings.md"
    )


@pytest.mark.parametrize("page", WITH_README, ids=_name)
def test_every_relative_link_and_its_anchor_leads_somewhere(page: Path) -> None:
    broken = []
    for link in _links(page):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in _links(DOCS / "README.md")}
    assert {page.resolve() for page in PAGES} - listed == {DOCS / "README.md"}


def test_every_asset_has_a_page() -> None:
    builders = {path.stem for path in (ROOT / "assets").glob("*.py") if "def build(" in path.read_text()}
    pages = {path.stem.replace("-", "_") for path in (DOCS / "steps").glob("*.md")}
    assert pages == builders


@pytest.mark.parametrize("page", WITH_README, ids=_name)
def test_every_make_target_named_is_in_the_makefile(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    # `[A-Z0-9_]+=... make X` sets a variable first.
    named = {
        match[1]
        for code in _in_code(page.read_text())
        if (match := re.match(r"(?:[A-Z0-9_]+=\S+ )*make ([a-z-]+)", code.strip()))
    }
    assert named - targets == set()


@pytest.mark.parametrize("page", WITH_README, ids=_name)
def test_every_eagle3_command_named_is_one_of_the_parser(page: Path) -> None:
    known = _subcommands()
    for code in _in_code(page.read_text()):
        for command, action in re.findall(r"(?:^|[\s/])eagle3 ([a-z]+)(?: ([a-z]+))?", code):
            assert command in known, f"eagle3 {command} in {_name(page)}"
            allowed = [one.choices for one in known[command]._actions if one.dest == "action"]
            if action and allowed and allowed[0]:
                assert action in allowed[0], f"eagle3 {command} {action} in {_name(page)}"


def test_the_variables_of_the_guide_are_those_of_the_code() -> None:
    pattern = r"\bEAGLE3_[A-Z_]*[A-Z]\b"
    documented = {name for page in PAGES for name in re.findall(pattern, page.read_text())}
    assert documented == set(re.findall(pattern, _code_text()))


@pytest.mark.parametrize("page", WITH_README, ids=_name)
def test_every_setting_named_is_in_the_schema(page: Path) -> None:
    unknown = {name for name in _settings_named(page.read_text()) if not _leads_to_a_setting(name.split("."))}
    assert unknown == set()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_linked_setting_leads_to_the_table_that_has_it(page: Path) -> None:
    wrong = []
    for name, anchor in re.findall(r"\[`([a-z0-9_.]+)`\]\([^)]*settings\.md#([a-z]+)\)", page.read_text()):
        section = re.search(
            rf"^## {anchor}\n(.*?)(?=^## |\Z)",
            (DOCS / "settings.md").read_text(),
            re.MULTILINE | re.DOTALL | re.IGNORECASE,
        )
        row = f"| `{name.split('.')[-1]}` |"
        if section is None or not (row in section[1] or _is_block(name, anchor)):
            wrong.append((name, anchor))
    assert wrong == []


def _is_block(name: str, anchor: str) -> bool:
    """Whether the link names a whole block and leads to that block's own table."""
    model: type[BaseModel] | None = Recipe
    for part in name.split("."):
        if model is None or part not in model.model_fields:
            return False
        model = _model_in(model.model_fields[part].annotation)
    return model is not None and model.__name__.lower() == anchor


def test_every_message_quoted_as_a_symptom_is_one_of_the_code() -> None:
    messages = _messages()
    unknown = []
    page = (DOCS / "when-something-goes-wrong.md").read_text()
    text, _, _ = page.partition("## Make a thing again")
    for cell in re.findall(r"^\| ([^|]+) \|", text, flags=re.MULTILINE):
        for symptom in re.findall(r"`([^`]+)`", cell):
            parts = [part.strip() for part in symptom.split("...")]
            if " " in symptom:  # else a kind of error, a folder, a variable
                unknown += [symptom for part in parts if len(part) > 3 and part not in messages]
    assert unknown == []


@pytest.mark.parametrize("page", sorted((DOCS / "steps").glob("*.md")), ids=_name)
def test_what_dagster_is_said_to_show_is_named_in_the_code(page: Path) -> None:
    section = re.search(r"^## What Dagster shows\n(.*?)^## ", page.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    words = set(re.findall(r"\w+", _code_text()))
    shown = set(re.findall(r"`(\w+)`", section[1]))
    assert {"path", "digest", "fingerprint", "commit"} <= shown
    assert shown - words == set()


def test_the_checks_of_links_and_settings_find_what_is_wrong(tmp_path: Path) -> None:
    assert _leads_to_a_setting(["generation", "concurrency"])
    assert _leads_to_a_setting(["server", "common", "python"])
    assert not _leads_to_a_setting(["generation", "temprature"])
    page = tmp_path / "page.md"
    page.write_text("# A `b` c, d\n\n## A\n\n## A\n\n```\n# no heading\n```\n")
    assert _anchors(page) == {"a-b-c-d", "a", "a-1"}
