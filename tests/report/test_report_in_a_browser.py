"""The page in a headless browser: nothing is fetched, hover tells of a group, the timeline zooms and moves, both colours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from group_offload.base.timeline import COMPUTE, COPIES, STALLS, Slice
from group_offload.report.facts import GroupFacts, MemoryFacts, ModelFacts, PartFacts, PassFacts, Place, ReportFacts
from group_offload.report.page import write_page

from ..support.browser import COMMAND, Browser, browser

pytestmark = pytest.mark.skipif(COMMAND is None, reason="no Chromium is installed")

LEFT, TOP, RIGHT = 66, 22, 6  # where page.js draws the first lane
NAMES = ["blocks_0", "blocks_1<i>", "blocks_2", "blocks_3"]


def a_pass(number: int) -> PassFacts:
    """Each group is sent in a quarter of the pass, and computed in the quarter after it."""
    slices = [Slice(COPIES, name, at / 4, (at + 1) / 4, 10**9) for at, name in enumerate(NAMES)]
    slices += [Slice(COMPUTE, name, (at + 1) / 4, (at + 1.5) / 4, 10**9) for at, name in enumerate(NAMES[:3])]
    slices += [Slice(STALLS, name, (at + 0.5) / 4, (at + 1) / 4, 0) for at, name in enumerate(NAMES[:3])]
    return PassFacts(title=f"forward {number}", seconds=1.0, slices=slices, how="recorded")


MODEL = ModelFacts(
    name="",
    model_class="Model",
    device="cuda:0",
    groups=[GroupFacts(name=name, num_bytes=10**9, place=Place.LOCKED, detail="pinned") for name in NAMES],
    passes=[a_pass(1), a_pass(2)],
    sentences=["The link to the device bounds a pass."],
    gains=[],
    plan=None,
    stats=None,
)
MEMORY = MemoryFacts(
    name="RAM", parts=[PartFacts("weights", 4 * 10**9, "locked")], budget_bytes=8 * 10**9, total_bytes=None
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("browser")
    models = [replace(MODEL, name="one"), replace(MODEL, name="two", device="cuda:1")]
    write_page(ReportFacts(title="Two", models=models, memories=[MEMORY], sentences=[]), folder / "run.html")
    with browser(folder / "profile") as found:
        found.look(1000, 800)
        found.open(folder / "run.html")
        yield found


def rectangle(page: Browser, selector: str) -> Any:
    page.ask(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
    found = page.ask(f"JSON.stringify(document.querySelector('{selector}').getBoundingClientRect())")
    return json.loads(found)


def at(page: Browser, share: float, down: float) -> tuple[float, float]:
    """A point of the first timeline: its share of what is seen, and how far below its top."""
    box = rectangle(page, "canvas.time")
    return box["left"] + LEFT + share * (box["width"] - LEFT - RIGHT), box["top"] + TOP + down


def tip(page: Browser) -> str:
    return str(page.ask("tip.hidden ? '' : tip.textContent"))


def view(page: Browser) -> list[float]:
    return [float(each) for each in page.ask("document.querySelector('canvas.time').dataset.view").split()]


def press(page: Browser, name: str) -> None:
    page.ask(f"document.querySelector('button[{name}]').click()")


def test_nothing_is_fetched_and_nothing_fails(page: Browser) -> None:
    assert page.ask("document.body.dataset.ready") == "yes"
    requests = [
        event["params"]["request"]["url"] for event in page.events if event["method"] == "Network.requestWillBeSent"
    ]
    assert requests and all(url.startswith("file://") and url.endswith("run.html") for url in requests)
    assert not [event for event in page.events if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
    assert page.ask("document.querySelectorAll('i:not(.bar i, .key i)').length") == 0  # no name became a tag


def test_hover_tells_of_a_group(page: Browser) -> None:
    press(page, 'data-act="all"')
    page.mouse("mouseMoved", *at(page, 0.4, 10))
    assert tip(page) == "blocks_1<i>\nlink: 250 ms, from 250 ms\n954 MiB at 4 GB/s"
    page.mouse("mouseMoved", *at(page, 0.3, 36))
    assert tip(page) == "blocks_0\ncompute: 125 ms, from 250 ms\n954 MiB"
    page.mouse("mouseMoved", *at(page, 0.99, 36))
    assert tip(page) == ""
    box = rectangle(page, "canvas.map")
    page.mouse("mouseMoved", box["left"] + box["width"] * 0.3, box["top"] + 8)
    assert tip(page) == "blocks_1<i>\n954 MiB, page-locked RAM\npinned"
    page.mouse("mouseMoved", 1, 1)
    assert tip(page) == ""


def test_zoom_and_move(page: Browser) -> None:
    press(page, 'data-act="all"')
    assert view(page) == [0, 1]
    press(page, 'data-act="in"')
    assert view(page) == [0.25, 0.75]
    page.mouse("mouseMoved", *at(page, 0.1, 10))
    assert tip(page).startswith("blocks_1<i>\n")  # what is under the pointer has moved with the picture
    x, y = at(page, 0.5, 10)
    for kind, dx in (("mousePressed", 0), ("mouseMoved", -100), ("mouseReleased", -100)):
        page.mouse(kind, x + dx, y, button="left", buttons=1 if kind != "mouseReleased" else 0, clickCount=1)
    start, end = view(page)
    assert start > 0.25 and end - start == pytest.approx(0.5, abs=1e-5)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200, modifiers=2)  # with Ctrl
    closer = view(page)
    assert closer[1] - closer[0] < 0.3
    before = view(page)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)  # without it, the page scrolls
    assert view(page) == before
    page.ask("document.querySelector('canvas.time').focus()")
    for key, change in (("ArrowRight", 1), ("-", 2), ("0", 0)):
        page.send("Input.dispatchKeyEvent", type="keyDown", key=key)
        page.send("Input.dispatchKeyEvent", type="keyUp", key=key)
        if change == 1:
            assert view(page)[0] > before[0]
    assert view(page) == [0, 1]
    for _ in range(30):
        press(page, 'data-act="in"')
    assert 0 < view(page)[1] - view(page)[0] < 1e-4
    press(page, 'data-pass="0"')
    assert view(page) == [0, 1]
    assert page.ask("document.querySelector('figcaption').textContent").startswith("forward 1, 1 s: link 1 s,")
    pressed = "document.querySelector('button[data-pass=\"0\"]').getAttribute('aria-pressed')"
    assert page.ask(pressed) == "true"


def test_light_dark_and_a_narrow_window(page: Browser) -> None:
    """The colours follow the user's, in the pictures too, and a phone need not scroll sideways."""
    pixel = "document.querySelector('canvas.map').getContext('2d').getImageData(20, 8, 1, 1).data.join()"
    ground = "getComputedStyle(document.body).backgroundColor"
    found = []
    for dark in (False, True):
        page.look(390, 800, dark=dark)
        found.append((page.ask(pixel), page.ask(ground)))
        assert page.ask("document.documentElement.scrollWidth <= 390")
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]
    page.look(1000, 800)
