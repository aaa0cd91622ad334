"""The HTML report: a document that nothing in it can break, and a page that works in a browser at 2 and at 94 layers.

The browser is headless Chromium: `apt-get install chromium chromium-driver`, as `.ci/run` does.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from disagmoe_compile import testing
from disagmoe_compile.cli.inspect_files import Sizes, plan_to_show, write_files
from disagmoe_compile.inspect.explain import (
    ExpertInfo,
    Explanation,
    StageInfo,
    TensorInfo,
    TransferInfo,
    explain_partition,
)
from disagmoe_compile.inspect.html_report import StageCode, render_report, report_document, write_report
from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.testing.plans import example_plan

NASTY = "</script><script>document.title = 'broken'</script><!-- <img src=x onerror=alert(1)>"
SMALLEST_TEXT = 8  # pixels on a screen of 1600 x 1000


def model_of(n_layers: int, name: str = "model") -> Explanation:
    """What explaining a model of that many equal layers gives, without tracing it."""
    stages: list[StageInfo] = []
    transfers: list[TransferInfo] = []
    for b in range(n_layers + 1):
        layer = f"{name}.layers.{b}"
        if b == n_layers:
            stages.append(_stage(f"A{b}", "attention", (), (f"{name}.norm.weight", "lm_head.weight")))
            break
        dense = tuple(
            f"{layer}.{part}.weight" for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate")
        )
        experts = tuple(f"{layer}.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj"))
        stages += [_stage(f"A{b}", "attention", (b,), dense), _stage(f"F{b}", "ffn", (b,), experts)]
        transfers += [
            TransferInfo(f"dispatch.{b}", "dispatch", "forward", f"A{b}", f"F{b}", 280, ("tokens",), False),
            TransferInfo(f"combine.{b}", "combine", "forward", f"F{b}", f"A{b + 1}", 256, ("out",), False),
            TransferInfo(f"residual.{b}", "p2p", "forward", f"A{b}", f"A{b + 1}", 300, ("x",), True),
            TransferInfo(f"combine_bwd.{b}", "combine", "backward", f"A{b + 1}", f"F{b}", 255, ("d",), False),
            TransferInfo(f"dispatch_bwd.{b}", "dispatch", "backward", f"F{b}", f"A{b}", 264, ("d",), False),
        ]
    experts_found = tuple(ExpertInfo(b, "grouped_mm", 128, 8, False, None) for b in range(n_layers))
    return Explanation(tuple(stages), tuple(transfers), experts_found, ())


def _stage(name: str, role: str, layers: tuple[int, ...], params: tuple[str, ...]) -> StageInfo:
    tensor = TensorInfo("tokens", (128, 64), "float32")
    return StageInfo(name, role, layers, 61, params, (tensor,), (tensor,), 12_400_000, 301_000)


def codes(explanation: Explanation) -> dict[str, StageCode]:
    return {
        stage.name: StageCode(f"class {stage.name}(torch.nn.Module):\n    # {NASTY}\n", {"linear": 3})
        for stage in explanation.stages
    }


class _Page(HTMLParser):
    """Tags, attributes, and the text of the element with the data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[tuple[str, str | None]] = []
        self.data, self._in_data = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [pair for pair in attrs if pair[0] in ("src", "href")]
        self._in_data = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data


# -- the document


def test_nothing_in_the_document_ends_the_element_that_it_stands_in() -> None:
    explanation = model_of(2, NASTY)
    document = report_document(NASTY, explanation, codes(explanation))
    page = _Page(render_report(document))
    assert json.loads(page.data) == json.loads(json.dumps(document))
    plain = _Page(render_report(report_document("title", model_of(2), {})))
    assert page.tags == plain.tags


def test_the_file_loads_nothing() -> None:
    text = render_report(report_document("title", model_of(2), {}))
    assert not _Page(text).references
    assert "@import" not in text


def test_layers_before_the_first_experts_stand_in_one_block() -> None:
    first = _stage("A0", "attention", (0, 1, 2), ())
    explanation = Explanation(
        (first, _stage("F0", "ffn", (2,), ()), _stage("A1", "attention", (), ())), (), (), ()
    )
    blocks = report_document("title", explanation, {})["blocks"]
    assert [(block["label"], block["stages"]) for block in blocks] == [
        ("layers 0-2", ["A0", "F0"]),
        ("head", ["A1"]),
    ]


def test_a_link_has_the_bytes_of_both_ways() -> None:
    links = report_document("title", model_of(1), {})["links"]
    found = [(link["kind"], link["bytes_per_token"], link["gradient_bytes"]) for link in links]
    assert found == [("dispatch", 280, 264), ("combine", 256, 255), ("residual", 300, None)]


def test_a_model_that_cannot_be_planned_says_why() -> None:
    document = report_document("title", model_of(1), {}, no_plan="the batch does not divide")
    assert document["timeline"] is None and document["no_plan"] == "the batch does not divide"


# -- the page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("selenium", reason="selenium drives the browser: pip install selenium")
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((path for name in names if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium with its driver: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.add_argument("--window-size=1600,1140")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.set_script_timeout(240)
    yield chrome
    chrome.quit()


class Report:
    """A report in the browser, used as a person uses it: by mouse and keys. A page that is open already is used again."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.browser = browser
        if browser.current_url != path.as_uri():
            browser.get(path.as_uri())
            self.wait("return document.body.dataset.ready === 'yes'")

    def start_over(self) -> None:
        """All blocks of a long report closed, nothing searched."""
        self.run(
            "document.getElementById('search').value = ''; report.picture.hits(null);"
            "if (report.picture.open.size) report.picture.openAll(false)"
        )
        self.wait("return report.picture.cy.nodes().length === 95")

    def run(self, script: str, *args: Any) -> Any:
        return self.browser.execute_script(script, *args)

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + 240
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never: {condition}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def boxes(self) -> list[str]:
        return self.run("return report.picture.cy.nodes().filter((n) => !n.isParent()).map((n) => n.id())")

    def click(self, selector: str, x: float, y: float) -> None:
        """At a place in an element, from its top left corner."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.by import By

        target = self.browser.find_element(By.CSS_SELECTOR, selector)
        middle = target.size["width"] / 2, target.size["height"] / 2
        ActionChains(self.browser).move_to_element_with_offset(
            target, round(x - middle[0]), round(y - middle[1])
        ).click().perform()

    def click_box(self, name: str) -> None:
        place = (
            "const p = report.picture.cy.getElementById(arguments[0]).renderedPosition(); return [p.x, p.y]"
        )
        self.click("#picture", *self.run(place, name))

    def search(self, *keys: str) -> None:
        from selenium.webdriver.common.by import By

        self.browser.find_element(By.ID, "search").send_keys(*keys)

    def errors(self) -> list[str]:
        return [line["message"] for line in self.browser.get_log("browser") if line["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def traced_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a real model of two layers, with every file that stands beside it."""
    out = tmp_path_factory.mktemp("report")
    call = testing.capture_call(
        testing.build_model("sorted_grouped_mm", n_layers=2), testing.language_batch()
    )
    partition = partition_model(call.captured)
    explanation = explain_partition(call.captured, partition)
    plan = plan_to_show(call.captured, partition, Sizes(2, 1, 1, 2))
    write_files(out, "style:sorted_grouped_mm", partition, explanation, plan)
    return out / "report.html"


@pytest.fixture(scope="module")
def long_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    explanation, plan = model_of(94), example_plan(Topology(8, 4, 1, 1, 94), 2)
    document = report_document(NASTY, explanation, codes(explanation), plan)
    return write_report(tmp_path_factory.mktemp("long") / "report.html", document)


@pytest.fixture
def short(browser: Any, traced_report: Path) -> Report:
    return Report(browser, traced_report)


@pytest.fixture
def long(browser: Any, long_report: Path) -> Report:
    report = Report(browser, long_report)
    report.start_over()
    return report


def test_a_short_model_is_open_and_a_click_shows_a_stages_code(short: Report) -> None:
    assert short.boxes() == ["A0", "F0", "A1", "F1", "A2"]
    short.click_box("F1")
    short.wait("return document.querySelector('#stage-name')?.textContent.startsWith('F1')")
    assert "class F1" in short.text("#stage-code")
    assert "blocks.1.moe.w1" in short.text("#stage-params")
    assert "blocks_1_moe_w1" in short.text("#stage-code")
    assert short.errors() == []


def test_the_files_beside_the_report_are_written(traced_report: Path) -> None:
    out = traced_report.parent
    schedule = (out / "schedule.txt").read_text()
    assert "0-1    attention.0  compute" in schedule and "0F0" in schedule
    assert 'A0 -> F0 [label="dispatch.0' in (out / "stages.dot").read_text()


def test_edges_carry_bytes_a_token_and_the_gradients_on_demand(short: Report) -> None:
    label = "return report.picture.cy.getElementById('A0>F0').data('label')"
    assert short.run(label).split("\n")[0] == "dispatch" and short.run(label).endswith(" B")
    before = short.run(label)
    short.run("document.getElementById('show-gradients').click()")
    short.wait(f"return ({label[7:]} || '').includes('back')")
    assert short.run(label).startswith(before)


def test_the_timeline_leads_to_a_stage(short: Report) -> None:
    found = short.run(
        "const t = report.timeline, a = t.data.groups[1].actions.find((a) => a[0] === '1F0');"
        "const b = t.box(a, 0, 1, 1); return [b.x + b.width / 2, b.y + b.height / 2]"
    )
    short.click("#timeline", *found)
    assert short.text("#stage-name").startswith("F0")
    assert short.text("#tip") == "1F0\nF0 forward, micro-batch 0, slot 2"


def test_a_long_model_is_closed_and_can_be_read_at_once(long: Report) -> None:
    boxes = long.boxes()
    assert len(boxes) == 95 and boxes[0] == "block0" and boxes[-1] == "A94"
    places = long.run(
        "return report.picture.cy.nodes().map((n) => { const b = n.renderedBoundingBox({ includeLabels: false });"
        " return [b.x1, b.y1, b.x2, b.y2]; })"
    )
    width, height = long.run(
        "const e = document.getElementById('picture'); return [e.clientWidth, e.clientHeight]"
    )
    assert all(x1 >= 0 and y1 >= 0 and x2 <= width and y2 <= height for x1, y1, x2, y2 in places)
    assert not any(_overlap(one, other) for i, one in enumerate(places) for other in places[:i])
    text = long.run(
        "return report.picture.cy.getElementById('block0').numericStyle('font-size') * report.picture.cy.zoom()"
    )
    assert text >= SMALLEST_TEXT
    assert long.errors() == []


def _overlap(one: list[float], other: list[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def test_a_click_opens_a_layer_and_closes_it(long: Report) -> None:
    long.click_box("block12")
    long.wait("return report.picture.cy.getElementById('F12').nonempty()")
    assert len(long.boxes()) == 96
    assert long.run("return report.picture.cy.getElementById('A12').parent().id()") == "block12"
    long.run("report.picture.cy.stop(true, true)")
    long.run("report.picture.toggle('block12')")
    long.wait("return report.picture.cy.getElementById('F12').empty()")


def test_searching_a_parameter_leads_to_its_stage(long: Report) -> None:
    from selenium.webdriver.common.keys import Keys

    long.search("layers.41.mlp.experts")
    assert long.text("#results .count") == "1 of 189 stages"
    assert long.run("return report.picture.cy.nodes('.hit').map((n) => n.id())") == ["block41"]
    long.search(Keys.ENTER)
    long.wait("return report.picture.cy.getElementById('F41').hasClass('selected')")
    assert long.text("#stage-name").startswith("F41")
    assert "class F41" in long.text("#stage-code")


def test_search_knows_stages_layers_operations_and_parameters(long: Report) -> None:
    def found(query: str) -> list[str]:
        return long.run("return report.search(arguments[0]).map((one) => one.name)", query)

    assert found("a7") == ["A7"]
    assert found("layer 7") == found("7") == ["A7", "F7"]
    assert len(found("LINEAR")) == 189
    assert len(found("q_proj")) == 94
    assert found("nowhere") == []


def test_everything_opens_and_closes(long: Report) -> None:
    long.run("document.getElementById('expand-all').click()")
    long.wait("return report.picture.cy.nodes().filter((n) => !n.isParent()).length === 189")
    long.run("document.getElementById('collapse-all').click()")
    long.wait("return report.picture.cy.nodes().length === 95")


def test_markup_in_names_and_code_stays_text(long: Report) -> None:
    assert long.run("return document.title") == NASTY
    assert long.text("#title") == NASTY
    long.click_box("block3")
    long.wait("return report.picture.cy.getElementById('A3').nonempty()")
    long.run("return report.select('A3')")
    assert NASTY in long.text("#stage-code")
    assert long.run("return document.querySelectorAll('img').length") == 0
