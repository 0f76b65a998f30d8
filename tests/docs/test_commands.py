"""Every command of the guide, held against what would read it: argparse, click, make, the import system."""

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from eagle3_pipeline.cli import _parser

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs" / "operations.md"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
PROGRAMS = ("eagle3", "dagster", "make", "python")
OURS = ("benchmarks", "docs", "eagle3_pipeline", "scripts")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _lines(page: Path) -> Iterator[str]:
    """Shell lines of the fenced blocks, whole; and what stands in backticks where it is a whole command."""
    text = page.read_text()
    for language, block in re.findall(r"^```([^\n]*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if language in ("", "bash"):
            yield from block.replace("\\\n", " ").splitlines()
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        # A word or two in a sentence is a name; with an option it is a command.
        if " -" in code or page == OPERATIONS:
            yield code


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of ours, from its program on: without variables before it, or a container."""
    for line in _lines(page):
        for part in line.split("&&"):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # an apostrophe: a drawing or a sentence, no command
                continue
            if words[:2] == ["docker", "compose"] and "exec" in words:
                words = words[words.index("exec") + 2 :]
            while words and re.fullmatch(r"[A-Z0-9_]+=.*", words[0]):
                words = words[1:]
            program = words[0].rpartition("/")[2] if words else ""  # none of `eagle3/`, a folder in a drawing
            if program in PROGRAMS:
                yield [program, *words[1:]]


def refusal(words: list[str]) -> str | None:
    """Why this command would not be taken, in the words of its own parser; None if it would."""
    program, *arguments = words
    if program == "eagle3":
        return _refusal_of_eagle3(arguments)
    if program == "dagster":
        return _refusal_of_dagster(arguments)
    if program == "make":
        tried = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        return tried.stderr if tried.returncode else None
    return _refusal_of_python(arguments)


def _refusal_of_eagle3(arguments: list[str]) -> str | None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _parser().parse_args(arguments)
    except SystemExit:
        return said.getvalue()
    return None


def _refusal_of_dagster(arguments: list[str]) -> str | None:
    from dagster._cli import create_dagster_cli

    command, name, parent = create_dagster_cli(), "dagster", None
    try:
        while True:
            context = command.make_context(name, list(arguments), parent=parent)
            if not isinstance(command, click.Group):
                return None
            rest = [*context._protected_args, *context.args]
            name, command, arguments = command.resolve_command(context, rest)
            parent = context
    except click.ClickException as error:
        return error.format_message()


def _refusal_of_python(arguments: list[str]) -> str | None:
    if arguments[:1] != ["-m"] or arguments[1].partition(".")[0] not in OURS:
        return None
    module = arguments[1]
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    return None if found else f"no module {module}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_of_a_page_is_taken_by_its_parser(page: Path) -> None:
    refused = {shlex.join(words): why for words in commands(page) if (why := refusal(words)) is not None}
    assert refused == {}


def test_every_row_of_operations_has_a_command_and_a_longer_text() -> None:
    rows = [line for line in OPERATIONS.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    lacking = []
    for row in rows:
        _, _, _, command, more, _ = re.split(r" ?\| ?", row)
        if not re.match(r"`(eagle3|dagster|make) ", command) or not ("](" in more or more == "the same"):
            lacking.append(row)
    assert lacking == []


@pytest.mark.parametrize(
    "command",
    [
        "eagle3 run --recipes smollm2-cpu",
        "eagle3 server pause",
        "eagle3 compare only-one",
        "dagster asset materialise -f definitions.py",
        "dagster job backfill --job x --every",
        "make dmeo",
        "python -m benchmarks.generation.nothing",
    ],
)
def test_a_command_that_is_wrong_is_found(command: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```bash\nNAME=value .venv/bin/{command}   # what it is for\n```\n")
    (words,) = commands(page)
    assert words == command.split()
    assert refusal(words)


def test_lines_that_go_on_and_several_in_one_line_are_read_whole(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\nmake setup && eagle3 run \\\n    --recipe NAME\n```\n")
    assert list(commands(page)) == [["make", "setup"], ["eagle3", "run", "--recipe", "NAME"]]
