"""The drawings: what stands where is where the numbers say; the SVG stands alone and is readable on both grounds."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from rich.cells import cell_len

from onepolicy.metrics.horizon import answer, horizon
from onepolicy.metrics.laws import Mixture
from onepolicy.metrics.whole_answer import Gap
from onepolicy.report.horizon import captions, render, verdict_sentence
from onepolicy.report.walks import _BOX, _HUES, _TALL, _WIDE, extent, ratio_label, svg, terminal, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return horizon(Gap(0.01), 10_000, answers=20)


def straight(*ends: float) -> dict[str, Any]:
    """Walks that are lines from 0 to `ends`, envelope +-1 at the end."""
    return {
        "reading": "walk",
        "tokens": [0, 50, 100],
        "log_ratio": [[0.0, end / 2, end] for end in ends],
        "drift": [0.0, 0.0, 0.0],
        "lower": [0.0, -0.7, -1.0],
        "upper": [0.0, 0.7, 1.0],
    }


# -- terminal ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 60, 77, 100, 300])
def test_it_fits_and_has_axes_with_units(result: dict[str, Any], width: int):
    lines = terminal(result["walks"], width).splitlines()
    assert len(lines) == 20
    assert max(map(cell_len, lines)) <= max(60, min(width, 100))
    assert lines[0].split() == ["nats", "ratio"]
    assert lines[-1].split()[0] == "tokens" and "10,000" in lines[-1]
    assert all(line.isprintable() for line in lines)


def heights(text: str, low: int, high: int) -> dict[int, list[int]]:
    """Column -> rows with a character of that range."""
    out: dict[int, list[int]] = {}
    for row, line in enumerate(text.splitlines()[1:18]):
        for column, c in enumerate(line[10:90]):
            if low <= ord(c) <= high:
                out.setdefault(column, []).append(row)
    return out


def test_a_walk_that_rises_is_drawn_rising_without_a_hole():
    dots = heights(terminal(straight(4.0), 100), 0x2801, 0x28FF)
    tops = [min(dots[c]) for c in sorted(dots)]
    assert tops == sorted(tops, reverse=True)
    assert tops[0] - tops[-1] >= 9
    assert len(dots) >= 70  # dashes stand in front in a few columns


def test_the_envelope_is_dashed_and_on_both_sides_of_the_drift():
    text = terminal(straight(0.0), 100)
    dashes = heights(text, ord("━"), ord("━"))
    assert dashes and all(column % 4 < 2 for column in dashes)
    last = dashes[max(dashes)]
    middle = min(heights(text, 0x2801, 0x28FF)[70])
    assert len(last) == 2 and last[0] < middle < last[1]
    assert middle - last[0] == pytest.approx(last[1] - middle, abs=1)


def test_labels_stand_at_their_height():
    lines = terminal(straight(4.0, -4.0), 100).splitlines()[1:18]
    zero = next(i for i, line in enumerate(lines) if line.strip().startswith("0 ┤"))
    assert zero == 8
    assert lines[zero].endswith("×1")


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (0.0, "×1"),
        (1.0, "×2.7"),
        (-1.0, "1/2.7"),
        (0.1, "×1.11"),
        (-5.0, "1/148"),
        (0.02, "×1.02"),
        (-0.0002, "1/1.0002"),
        (2e-6, "×1.000002"),
        (9.2, "×9,897"),
        (-10.0, "1/2.2e4"),
        (math.log(1e5), "×1e5"),
        (math.log(9.99e6), "×1e7"),
        (-800.0, "1/2.7e347"),
        (1e5, "×3e43429"),
        (1e7, ""),
    ],
)
def test_ratio_labels(y: float, said: str):
    assert ratio_label(y) == said
    assert len(said) <= 10  # the terminal's margin


@pytest.mark.parametrize("length", [1, 2, 3, 10_000])
def test_no_label_stands_at_a_part_of_a_token(length: int):
    walks = straight(1.0) | {"tokens": [0, length // 2, length]}
    root = ET.fromstring(svg(walks, "t", "n"))
    labels = [e.text or "" for e in root.iter(SVG + "text") if e.get("y") == str(_BOX[3] + 18)]
    assert labels[0] == "0" and labels[-1] == f"{length:,}"
    assert not any("." in label for label in labels)
    assert "." not in terminal(walks, 80).splitlines()[-1]


@pytest.mark.parametrize(("low", "high"), [(-3.2, 2.1), (0, 10_000), (-1e-3, 2e-3), (-9e6, 1.0), (0, 1)])
def test_ticks_are_round_few_and_inside(low: float, high: float):
    found = ticks(low, high, 9)
    assert 2 <= len(found) <= 10
    step = found[1] - found[0]
    assert low - 1e-9 * step <= found[0] and found[-1] <= high + 1e-9 * step
    assert float(f"{step:.6e}".split("e")[0]) in (1, 2, 5)


# -- SVG ---------------------------------------------------------------------------------------------------------------


def test_the_svg_stands_alone(result: dict[str, Any]):
    text = svg(result["walks"], *captions(result))
    root = ET.fromstring(text)
    assert len(text) < 20_000
    assert not re.findall(r"(href|url\(|@import|<script|<image|https?://(?!www\.w3\.org/2000/svg))", text)
    assert {e.tag.removeprefix(SVG) for e in root.iter()} == {"svg", "title", "desc", "style", "rect", "text", "path"}
    assert root.get("role") == "img"
    names = (root.get("aria-labelledby") or "").split()
    assert names == [root[0].get("id"), root[1].get("id")]
    assert [root[0].tag, root[1].tag] == [SVG + "title", SVG + "desc"]
    assert "After 10,000 tokens the walks are at" in (root[1].text or "")
    words = [e.text for e in root.iter(SVG + "text")]
    assert {"tokens", "log-ratio, nats", "ratio of the answer", "10,000"} <= set(words)


def points(d: str) -> list[tuple[float, float]]:
    start, steps = d.removeprefix("M").split("l")
    x, y = map(float, start.split())
    out = [(x, y)]
    numbers = list(map(float, steps.split()))
    for dx, dy in zip(numbers[::2], numbers[1::2], strict=True):
        out.append((out[-1][0] + dx, out[-1][1] + dy))
    return out


def test_every_point_of_the_svg_is_where_its_number_is(result: dict[str, Any]):
    """Read back from the paths through the axes; steps must not add their rounding up."""
    walks = result["walks"]
    root = ET.fromstring(svg(walks, "t", "n"))
    low, high = extent(walks)
    paths = {
        c: [points(p.get("d") or "") for p in root.iter(SVG + "path") if p.get("class") == c] for c in ("w", "en", "dr")
    }
    wanted = {"w": walks["log_ratio"], "en": [walks["lower"], walks["upper"]], "dr": [walks["drift"]]}
    assert {c: len(p) for c, p in paths.items()} == {"w": 8, "en": 2, "dr": 1}
    left, top, right, bottom = _BOX
    for name, curves in wanted.items():
        for path, curve in zip(paths[name], curves, strict=True):
            back = [high - (y - top) / (bottom - top) * (high - low) for _, y in path]
            assert back == pytest.approx(curve, abs=0.06 * (high - low) / (bottom - top))
            assert [x for x, _ in path] == pytest.approx(
                [left + t / 10_000 * (right - left) for t in walks["tokens"]], abs=0.06
            )


def test_nothing_leaves_the_picture(result: dict[str, Any]):
    root = ET.fromstring(svg(result["walks"], *captions(result)))
    for e in root.iter(SVG + "text"):
        x, y, wide = float(e.get("x") or 0), float(e.get("y") or 20), 7 * len(e.text or "")
        start = {"middle": x - wide / 2, "end": x - wide}.get(e.get("text-anchor") or "", x)
        if not e.get("transform"):
            assert start >= 0 and start + wide <= _WIDE and 0 < y < _TALL, e.text


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """WCAG 2."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("ground", ["#ffffff", "#14161a"])
def test_lines_stand_out_on_light_and_on_dark(ground: str):
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert min(contrast(hue, ground) for hue in _HUES) >= 3
    assert len(set(_HUES)) == 8


def test_the_style_knows_both_grounds(result: dict[str, Any]):
    style = ET.fromstring(svg(result["walks"], "t", "n")).findtext(SVG + "style") or ""
    light, dark = style.split("@media(prefers-color-scheme:dark)")
    for name in ("text", ".bg", ".en", ".n", ".ax"):
        assert name in light and name in dark, name
    assert "#14161a" in dark


def test_titles_are_escaped(result: dict[str, Any]):
    assert ET.fromstring(svg(result["walks"], "a < b & c", "<script>"))[0].text == "a < b & c"


# -- words -------------------------------------------------------------------------------------------------------------


def test_the_verdict_sentence():
    assert verdict_sentence(answer(0.068, 4096)) == (
        "at your 4,096-token replies a whole answer's log-ratio is -9.5 ± 4.4: sequence-level weights are unusable"
    )
    assert verdict_sentence(answer(0.01, 10_000)).endswith(
        "is -0.5 ± 1: sequence-level weights are costly (36.8% of the answers count)"
    )
    assert verdict_sentence(answer(0.001, 1000)).endswith("sequence-level weights are usable")
    assert verdict_sentence(answer(3.0, 10**6)).endswith("unusable")
    assert verdict_sentence({}) == ""


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("answers", [0, 1, 20])
def test_the_page_fits_any_width(width: int, answers: int):
    text = render(horizon(Gap(0.03, Mixture(0.01, 10.0), 0.2, -0.001), 5000, answers=answers, notes=["x " * 90]), width)
    assert max(map(cell_len, text.splitlines())) <= width
    for label in ("textbook walk", "normalised", "given bias", "half are off by 2x after"):
        assert label in text
    assert ("simulated" in text) == (answers > 0)
    assert ("answers, given bias" in text or "One answer, given bias" in text) == (answers > 0)


def test_closed_and_simulated_stand_side_by_side(result: dict[str, Any]):
    lines = render(result).splitlines()
    row = next(line for line in lines if "off by 2x or more" in line).split()
    assert (row[-4], row[-2]) == ("48.8%", "54%")
    half = next(line for line in lines if "half are off by 2x after" in line)
    assert "10,561" in half and "8,560" in half
    typical = next(line for line in lines if "typical factor" in line).split()
    assert typical[-4] == "×2.72" and typical[-2:] == ["–", "–"]
    assert "costly" in " ".join(lines[-3:])
