"""`onepolicy tokens`: rollouts, tokenizers, templates, from end to end; engines are in tests/engines."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from onepolicy.models import path as packaged
from onepolicy.tokens.open import open_tokenizer

TEXT = "The lighthouse blinked twice before dawn, and 12 boats came home."
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def lines(path: Path, rows: list[Any]) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def reply(name: str, ids: list[int], **more: Any) -> dict[str, Any]:
    """A finished reply of the packaged model, its stop token trained."""
    stop = 258 if "stop" not in more else more.pop("stop")
    ids = [*ids, stop]
    mask = [1] * len(ids)
    given = {"id": name, "prompt_ids": [5, 6], "response_ids": ids, "loss_mask": mask, "finish_reason": "stop"}
    return {**given, "stop_token_ids": [stop], **more}


@pytest.fixture(scope="module")
def tiny() -> Any:
    return open_tokenizer("tiny")


@pytest.fixture
def canonical(tmp_path: Path, tiny: Any) -> Path:
    ids = tiny.encode([TEXT])[0]
    stop = tiny.special_ids()["eos"]
    return lines(tmp_path / "rollouts.jsonl", [reply(f"r{i}", ids, stop=stop) for i in range(3)])


def in_pieces(tiny: Any) -> list[int]:
    """The text, its first token of several bytes spelled byte by byte: other ids, the same text."""
    ids = tiny.encode([TEXT])[0]
    at = next(i for i, x in enumerate(ids) if len(tiny.token_bytes(x) or b"") > 1)
    single = {tiny.token_bytes(i): i for i in range(tiny.size) if len(tiny.token_bytes(i) or b"") == 1}
    return [*ids[:at], *(single[bytes([b])] for b in tiny.token_bytes(ids[at])), *ids[at + 1 :]]


# rollouts


def test_canonical_rollouts_pass_without_a_finding(cli: Command, canonical: Path):
    ran = cli("tokens", canonical, "--tokenizer", "tiny", "--json")
    report = json.loads(ran.out)
    assert (ran.code, ran.err, report["outcome"], report["findings"]) == (0, "", "pass", [])
    assert report["counts"]["records"] == 3
    assert report["details"]["round_trip"]["checked"] == {"prompt": 3, "reply": 3, "join": 3}


@pytest.mark.parametrize(
    ("flag", "code", "finding"), [([], 0, "noncanonical-ids"), (["--reencodes"], 1, "retokenization-drift")]
)
def test_what_other_ids_of_one_text_mean_depends_on_the_pipeline(
    cli: Command, tmp_path: Path, tiny: Any, flag: list[str], code: int, finding: str
):
    stop = tiny.special_ids()["eos"]
    ids, again = in_pieces(tiny), tiny.encode([TEXT])[0]
    file = lines(tmp_path / "r.jsonl", [reply("odd", ids, stop=stop), reply("even", again, stop=stop)])
    ran = cli("tokens", file, "--tokenizer", "tiny", "--json", *flag)
    (found,) = json.loads(ran.out)["findings"]
    assert (ran.code, found["code"]) == (code, finding)
    assert "record odd" in found["place"] and found["evidence"]["class"] == "other-segmentation"
    assert found["evidence"]["reencoded_ids"] == [*again, stop]
    assert "filter" not in found["advice"] or "do not filter" in found["advice"]


def test_a_file_alone_is_counted_and_its_masks_are_read(cli: Command, tmp_path: Path):
    rows = [
        reply("short", [40, 41], logprobs=[-0.1, -0.2]),
        reply("masked", [40, 41], loss_mask=[1, 1, 0]),
        reply("fine", [40, 41], logprobs=[-0.1, -0.2, -0.3]),
    ]
    ran = cli("tokens", lines(tmp_path / "r.jsonl", rows), "--json")
    found = {f["code"]: f for f in json.loads(ran.out)["findings"]}
    assert ran.code == 1
    assert set(found) == {"counts-disagree", "stop-token-not-trained"}
    assert "short" in found["counts-disagree"]["message"] and "masked" in found["stop-token-not-trained"]["message"]


def test_one_kind_of_finding_is_told_once_with_its_number(cli: Command, tmp_path: Path):
    rows = [reply(f"r{i}", [40, 41], loss_mask=[1, 1, 0]) for i in range(50)]
    ran = cli("tokens", lines(tmp_path / "r.jsonl", rows), "--json")
    (found,) = json.loads(ran.out)["findings"]
    assert found["message"].startswith("50 times, the first: r0") and found["evidence"]["records"] == 50
    assert len(found["evidence"]["places"]) == 8


def test_a_broken_line_is_left_out_and_named(cli: Command, canonical: Path):
    good = canonical.read_text(encoding="utf-8")
    canonical.write_text(good + '{"id": "cut", "response_ids": [1, 2\n' + good, encoding="utf-8")
    ran = cli("tokens", canonical, "--json")
    (found,) = json.loads(ran.out)["findings"]
    assert (ran.code, found["code"], found["severity"]) == (0, "lines-skipped", "warn")
    assert f"{canonical}:4" in found["place"]
    strict = cli("tokens", canonical, "--strict")
    assert (strict.code, strict.out) == (4, "") and f"{canonical}:4: not JSON" in strict.err


def test_texts_without_ids_are_not_a_pass(cli: Command, tmp_path: Path):
    file = lines(tmp_path / "texts.jsonl", [{"id": "a", "response_text": TEXT}])
    for more, said in ((["--tokenizer", "tiny"], "only the texts were checked"), ([], "nothing was checked")):
        ran = cli("tokens", file, "--json", *more)
        found = {f["code"]: f for f in json.loads(ran.out)["findings"]}
        assert ran.code == 3 and said in found["nothing-checked"]["message"]


# tokenizers


def edited(tmp_path: Path, change: dict[str, Any]) -> Path:
    data = json.loads((Path(packaged("tiny")) / "tokenizer.json").read_text(encoding="utf-8"))
    out = tmp_path / "other.json"
    out.write_text(json.dumps({**data, **change}), encoding="utf-8")
    return out


def test_two_equal_tokenizers_pass(cli: Command, tmp_path: Path):
    ran = cli("tokens", "--tokenizer", "tiny", "--scorer-tokenizer", edited(tmp_path, {}))
    assert (ran.code, ran.err) == (0, "") and "the two tokenizers give the same ids" in ran.out


def test_two_tokenizers_that_split_otherwise(cli: Command, tmp_path: Path):
    other = edited(tmp_path, {"normalizer": {"type": "Lowercase"}})
    ran = cli("tokens", "--tokenizer", "tiny", "--scorer-tokenizer", other, "--json")
    report = json.loads(ran.out)
    assert ran.code == 1 and [f["code"] for f in report["findings"] if f["severity"] == "fail"] == [
        "normalizer-differs"
    ]
    assert {row["part"]: row["state"] for row in report["details"]["pair"]["parts"]}["vocabulary"] == "same"


def test_one_tokenizer_is_asked_what_it_keeps(cli: Command, tmp_path: Path):
    ran = cli("tokens", "--tokenizer", edited(tmp_path, {"normalizer": {"type": "Lowercase"}}), "--json")
    report = json.loads(ran.out)
    (found,) = [f for f in report["findings"] if f["code"] == "text-not-kept"]
    assert ran.code == 0 and found["place"].startswith("probe ")
    (kept,) = [x for x in report["listings"] if x["title"] == "Text to ids to text"]
    rows = {row[0]: int(row[2]) for row in kept["rows"]}
    assert rows["capitals"] == 18 and rows["all others"] == 0
    assert "white-space" in kept["rows"][-1][4]


# templates


def test_a_template_that_appends_passes(cli: Command, tmp_path: Path):
    file = tmp_path / "chatml.jinja"
    file.write_text(CHATML, encoding="utf-8")
    ran = cli("tokens", "--template", file, "--tokenizer", "tiny")
    assert (ran.code, ran.err) == (0, "") and "Is it safe for multi-turn RL?" in ran.out


def test_a_template_that_rewrites_history_drifts(cli: Command, tmp_path: Path):
    file = tmp_path / "strips.jinja"
    file.write_text(CHATML.replace("m.content ~", "(m.content if loop.last else m.content | trim) ~"), encoding="utf-8")
    own = lines(tmp_path / "own.jsonl", [{"messages": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho "}, {"role": "user", "content": "Ha"},
    ]}])  # fmt: skip
    ran = cli("tokens", "--template", file, "--conversations", own, "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["findings"][0]["code"] == "history-rewritten-by-template"


def test_two_templates(cli: Command, tmp_path: Path):
    a, b = tmp_path / "a.jinja", tmp_path / "b.jinja"
    a.write_text(CHATML, encoding="utf-8")
    b.write_text(CHATML.replace("m.content ~", "m.content ~ ' ' ~"), encoding="utf-8")
    assert cli("tokens", "--template", a, "--scorer-template", a).code == 0
    ran = cli("tokens", "--template", a, "--scorer-template", b, "--json")
    assert ran.code == 1 and json.loads(ran.out)["findings"][0]["code"] == "chat-template-differs"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content", "template-failed"),
        ("{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}", "template-failed"),
    ],
    ids=["cut off", "endless"],
)
def test_a_template_that_fails_is_one_finding(cli: Command, tmp_path: Path, template: str, said: str):
    file = tmp_path / "bad.jinja"
    file.write_text(template, encoding="utf-8")
    ran = cli("tokens", "--template", file, "--json")
    (found,) = json.loads(ran.out)["findings"]
    assert (ran.code, found["code"]) == (4, said) and "Traceback" not in ran.err


# what is written


def test_reports_in_every_format(cli: Command, canonical: Path, tmp_path: Path):
    out = [tmp_path / f"report.{suffix}" for suffix in ("json", "md", "xml")]
    flags = [x for path in out for x in ("-o", path)]
    assert cli("tokens", canonical, "--tokenizer", "tiny", *flags).code == 0
    assert json.loads(out[0].read_text(encoding="utf-8"))["onepolicy_tokens"] == 1
    assert out[1].read_text(encoding="utf-8").startswith("## ✓ onepolicy tokens: pass")
    suite = ET.parse(out[2]).getroot()[0]
    assert (suite.get("name"), suite.get("failures")) == ("onepolicy tokens", "0")
    again = cli("tokens", canonical, "-o", out[0])
    assert again.code == 2 and "exists; --overwrite replaces it" in again.err


def test_hostile_text_is_printable_and_no_markup(cli: Command, tmp_path: Path):
    file = lines(tmp_path / "r.jsonl", [reply("\x1b[2J<script>|`@all\u202e", [40], loss_mask=[1, 0])])
    ran = cli("tokens", file, "-o", tmp_path / "r.md")
    assert ran.code == 0 and "\x1b" not in ran.out and "\u202e" not in ran.out
    assert "<script>" not in (tmp_path / "r.md").read_text(encoding="utf-8").replace("`", "\0").split("\0")[0]


# bad input


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ((), 2, "nothing to look at"),
        (("x.jsonl", "--template", "y.jinja"), 2, "one thing at a time"),
        (("--sampler", "fake:"), 2, "go together"),
        (("--scorer-tokenizer", "tiny"), 2, "nothing to look at"),
        (("missing.jsonl",), 2, "no such file"),
        (("--tokenizer", "nowhere"), 2, "no such file"),
        (("--template", "missing.jinja"), 2, "cannot be read"),
    ],
)
def test_bad_command_lines_are_one_line(cli: Command, argv: tuple[str, ...], code: int, said: str):
    ran = cli("tokens", *argv)
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err and ran.err.count("\n") == 1


def test_ids_that_no_vocabulary_has(cli: Command, tmp_path: Path):
    file = lines(tmp_path / "r.jsonl", [reply("neg", [4, -100]), reply("large", [4, 99999])])
    for more, names in (([], {"-100"}), (["--tokenizer", "tiny"], {"-100", "99999"})):
        ran = cli("tokens", file, "--json", *more)
        found = [f for f in json.loads(ran.out)["findings"] if f["code"] == "unknown-ids"]
        assert ran.code == 1 and all(name in json.dumps(found) for name in names)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": "mixed", "response_ids": [1, "2"]}, "response_ids"),
        ({"id": "half", "response_ids": [1.5]}, "1.5"),
    ],
)
def test_ids_that_are_none_are_named(cli: Command, canonical: Path, row: dict[str, Any], said: str):
    canonical.write_text(canonical.read_text(encoding="utf-8") + json.dumps(row) + "\n", encoding="utf-8")
    (found,) = json.loads(cli("tokens", canonical, "--json").out)["findings"]
    assert found["code"] == "lines-skipped" and said in found["evidence"]["places"][0]


# options that belong to another question


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--template", "t.jinja", "--reencodes"], "--reencodes goes with a FILE of rollouts"),
        (["--template", "t.jinja", "--stop-id", "2"], "--stop-id goes with a FILE of rollouts"),
        (["rollouts.jsonl", "--conversations", "c.jsonl"], "--conversations goes with --template"),
        (["--tokenizer", "tiny", "--scorer-tokenizer", "tiny", "--conversations", "c"], "--conversations goes with"),
        (["--sampler", "fake:", "--scorer", "fake:", "--tokenizer", "tiny"], "--tokenizer goes with rollouts"),
    ],
)
def test_an_option_that_would_be_ignored_is_an_error(cli: Command, more: list[str], said: str):
    ran = cli("tokens", *more)
    assert (ran.code, ran.out) == (2, "") and said in ran.err and ran.err.count("\n") == 1


def test_a_file_that_is_no_template_is_not_a_pass(cli: Command, tmp_path: Path):
    file = tmp_path / "script.py"
    file.write_text("print('.')", encoding="utf-8")
    ran = cli("tokens", "--template", file, "--json")
    (found,) = json.loads(ran.out)["findings"]
    assert (ran.code, found["code"]) == (3, "nothing-checked") and "no chat template" in found["message"]


def test_a_text_without_its_stop_token_is_no_loss_where_ids_are_kept(cli: Command, tmp_path: Path, tiny: Any):
    ids, stop = tiny.encode([TEXT])[0], tiny.special_ids()["eos"]
    file = lines(tmp_path / "r.jsonl", [reply("a", ids, stop=stop, response_text=TEXT)])
    ran = cli("tokens", file, "--tokenizer", "tiny", "--json")
    (trip,) = json.loads(ran.out)["listings"]
    assert ran.code == 0 and ["text", "1", "0", "stop-token-not-in-text 1"] in trip["rows"]
