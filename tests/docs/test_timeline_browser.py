"""The page in a real browser, headless Chromium: everything drawn has a size, and nothing covers anything else."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from kit.servers.browser import dom_of
from kit.stories.event_logs import NodeLog, a_crash, a_node_lost
from kit.stories.timelines import HOSTILE, Elements, cold_and_warm, data_of, many_restarts, story_of

from aelastic.tools.timeline.html import page

pytestmark = pytest.mark.all  # `tests/core/test_timeline*` read the page without a browser

# Reports, from inside the page, the position of everything in pixels; then a reader's actions, and their effects.
PROBE = """<pre id="probe"></pre><script>
const boxes = (query) => [...document.querySelectorAll(query)].map((el) => {
  const { left, top, width, height } = el.getBoundingClientRect(), style = getComputedStyle(el);
  return { left, top, width, height, fill: style.fill, text: el.tagName === 'text' ? el.textContent : '',
    classes: el.getAttribute('class'), name: el.dataset.name || '' };
});
const drawn = { blocks: boxes('.block'), texts: boxes('#chart text').filter((box) => box.width), chart: boxes('#chart')[0],
  marks: boxes('.mark.failure') };
const find = document.getElementById('find'), seen = () => [...document.querySelectorAll('.node')].filter(
  (el) => el.getAttribute('display') !== 'none').map((el) => el.dataset.name);
const heights = [document.getElementById('chart').getBoundingClientRect().height], found = [];
for (const asked of ['node-b', 'loss is NaN', 'nothing like it', '']) {
  find.value = asked; find.oninput(); found.push(seen());
  heights.push(document.getElementById('chart').getBoundingClientRect().height);
}
const press = (key) => document.dispatchEvent(new KeyboardEvent('keydown', { key }));
const shown = () => +document.getElementById('window')?.getAttribute('width');
const windows = ['n', '0', '+', '+', '-', '0'].map((key) => { press(key); return shown(); });
press('/');
document.getElementById('probe').textContent = JSON.stringify({ ...drawn, found, heights, windows,
  is_focused: document.activeElement === find });
</script></body>"""
# Pages on phones, side by side.
PHONES = """<!DOCTYPE html><body style="margin:0">{}<pre id="probe"></pre><script>onload = () => {{
  const told = [...document.querySelectorAll('iframe')].map((phone) => {{
    const root = phone.contentDocument.documentElement, wide = [];
    for (const el of root.querySelectorAll('body *')) {{
      const box = el.getBoundingClientRect();
      if (box.right > root.clientWidth + 0.5 && !el.closest('.frame, .scroll')) wide.push(el.outerHTML.slice(0, 80));
    }}
    const cut = [...root.querySelectorAll('.card .scroll')].filter((table) => table.scrollWidth > table.clientWidth).length;
    return {{ wide, cut, over: root.scrollWidth - root.clientWidth }};
  }});
  document.getElementById('probe').textContent = JSON.stringify({{ told }});
}};</script></body>"""


def browse(folder: Path, text: str, fragment: str = "") -> str:
    """The page as rendered in the browser, once its script has run."""
    file = folder / "page.html"
    file.write_text(text)
    return dom_of(f"{file.as_uri()}{fragment}", folder)


def look(folder: Path, text: str, probe: str = PROBE) -> dict[str, Any]:
    """Positions of everything in pixels, or the result of another probe."""
    # The page's policy allows only its own script; this allows the probe as well.
    opened = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace(
        "</body>", probe or "</body>"
    )
    answer = re.search(r'<pre id="probe">(.*?)</pre>', browse(folder, opened), re.DOTALL)
    assert answer is not None
    found: dict[str, Any] = json.loads(html.unescape(answer[1]))
    return found


def test_blocks_have_a_size_and_a_colour_nodes_are_found_and_keys_move_the_view(tmp_path: Path) -> None:
    seen = look(tmp_path, page(story_of(*a_crash())))

    blocks = seen["blocks"]
    assert len(blocks) == 18 + 8
    assert all(box["width"] > 0.5 and box["height"] > 5 for box in blocks)
    names = {box["name"] for box in blocks if box["name"]}
    assert names == {"rendezvous", "spawn", "run", "detect", "stop", "await", "barrier"}
    colours = {box["name"]: box["fill"] for box in blocks if box["name"]}
    assert len(set(colours.values())) == 7
    outcomes = {box["classes"]: box["fill"] for box in blocks if not box["name"]}
    assert len(set(outcomes.values())) == len(outcomes) == 3
    (mark,) = seen["marks"]
    assert mark["width"] > 8 and mark["height"] > 8
    nothing_is_covered(seen)

    assert seen["found"] == [["node-b"], ["node-b"], [], ["node-a", "node-b"]]
    whole, of_one, *_, last = seen["heights"]
    assert of_one < whole == pytest.approx(last), "the others are folded away, and come back"
    restart, all_, half, quarter, half_again, _ = seen["windows"]
    assert 0 < restart < quarter < half == pytest.approx(half_again) and all_ == 0
    assert seen["is_focused"]


@pytest.mark.parametrize(
    "nodes",
    [
        (many_restarts(200),),
        tuple(NodeLog(f"node-{place}", workers=8) for place in range(40)),
        a_node_lost(),
        tuple(NodeLog(f"a-node-with-a-long-name-{place}.example.com", workers=8) for place in range(8)),
    ],
    ids=["many restarts", "320 ranks", "node lost", "64 ranks"],
)
def test_no_text_of_the_picture_covers_another_or_is_cut_off(tmp_path: Path, nodes: tuple[NodeLog, ...]) -> None:
    nothing_is_covered(look(tmp_path, page(story_of(*nodes))))


def test_times_of_a_narrow_picture_do_not_cover_each_other(tmp_path: Path) -> None:
    text = page(story_of(many_restarts(24))).replace("width: 100%; min-width: 860px", "width: 360px")
    seen = look(tmp_path, text)
    assert seen["chart"]["width"] == 360
    nothing_is_covered(seen)


def nothing_is_covered(seen: dict[str, Any]) -> None:
    chart, texts = seen["chart"], seen["texts"]
    assert len(texts) > 5
    for box in texts:
        assert chart["left"] <= box["left"] and box["left"] + box["width"] <= chart["left"] + chart["width"], box
        assert chart["top"] <= box["top"] and box["top"] + box["height"] <= chart["top"] + chart["height"], box
    # A letter's box is as high as the font, which is more than its ink.
    texts.sort(key=lambda box: box["top"])
    for place, box in enumerate(texts):
        for other in texts[place + 1 : place + 60]:
            across = min(box["left"] + box["width"], other["left"] + other["width"]) - max(box["left"], other["left"])
            down = box["top"] + box["height"] - other["top"]
            assert across <= 0 or down < 0.4 * other["height"], (box, other)


def test_blocks_stand_where_their_times_are_and_words_above_how_a_worker_started(tmp_path: Path) -> None:
    text = page(story_of(cold_and_warm()))
    elements, scale = Elements(browse(tmp_path, text)), 1014 / data_of(text)["length"]

    for attrs in elements.of("block"):
        assert float(attrs["x"]) == pytest.approx(float(attrs["data-s"]) * scale, abs=0.02)
        length = float(attrs["data-e"]) - float(attrs["data-s"])
        assert float(attrs["width"]) == pytest.approx(max(length * scale - 0.8, 1.5), abs=0.02)
    below_line = 0.24 * 11  # of a "g"
    baselines = [float(attrs["y"]) for attrs in elements.of("in") if "run" not in attrs["class"]]
    strips = [float(attrs["y"]) - 0.6 for attrs in elements.of("start")]  # with half of the border
    assert [any(0 < strip - line - below_line < 3 for line in baselines) for strip in strips] == [True] * 4


@pytest.mark.ci
def test_the_script_runs_and_zooms_and_nothing_that_a_log_brings_along_runs(tmp_path: Path) -> None:
    attack = (
        "</title></text></svg><img src=x onerror=\"document.body.id='owned'\"><script>document.body.id='owned'</script>"
    )
    logs = *a_crash(attack), NodeLog(attack, begins=3.0), NodeLog(HOSTILE, begins=3.0)
    # Even if escaping failed, the page's policy would be the last line of defence.
    forced = page(story_of(*logs)).replace("<h2>", f"{attack}<h2>", 1)
    whole, close = browse(tmp_path, forced), browse(tmp_path, forced, "#t=9.9,10.4")

    assert '<html lang="en" class="live">' in whole  # the page's own policy allows it
    assert 'id="owned"' not in whole
    without = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", forced)
    assert 'id="owned"' in browse(tmp_path, without)  # otherwise the test could not fail

    widths = [
        {
            attrs["data-name"]: float(attrs["width"])
            for attrs in Elements(dom).of("block", "phase")
            if "data-name" in attrs and "display" not in attrs
        }
        for dom in (whole, close)
    ]
    assert widths[0]["stop"] < 10
    assert widths[1]["stop"] == pytest.approx(0.1 / 0.5 * 1014, abs=2)
    assert ">10.1 s<" in close and ">10.1 s<" not in whole
    assert "barrier" not in widths[1]  # it is out of view


def test_on_a_phone_nothing_is_wider_than_the_screen_but_the_picture_and_long_lists(tmp_path: Path) -> None:
    pages = [html.escape(page(story_of(*nodes))) for nodes in (a_crash(), (many_restarts(40),))]
    phones = [f'<iframe width="390" height="844" srcdoc="{each}"></iframe>' for each in pages]
    measured = look(tmp_path, PHONES.format("\n".join(phones)), "")["told"]
    assert measured == [{"wide": [], "cut": 0, "over": 0}] * 2
