"""A line of JSON becomes a prompt or a text, or one clear line of complaint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onepolicy.errors import ContentError, UnknownName, UsageError
from onepolicy.suite import SuitePrompt, SuiteText, load, own_prompts, read_prompts
from onepolicy.suite.items import Made, item

CHAT = [{"role": "user", "content": "hi"}]


def one(row: object) -> SuitePrompt | SuiteText:
    return item(row, "f:1", "f:1", "f")


def test_a_reply_makes_a_text():
    assert one({"prompt": "a"}) == SuitePrompt("f:1", "f", "smoke", "f:1", "a")
    assert one({"prompt": "a", "reply": ""}) == SuiteText("f:1", "f", "smoke", "f:1", "a", "")
    assert one({"messages": CHAT, "reply": "b"}) == SuiteText("f:1", "f", "smoke", "f:1", CHAT, "b")
    assert one("just text").prompt == "just text"


def test_names_are_taken_where_they_are_given():
    row = {"id": "x", "category": "c", "size": "full", "group": "g", "prompt": "a", "x_source": 3}
    assert one(row) == SuitePrompt("x", "c", "full", "g", "a")


def test_made_items():
    made = {"make": "chronicle", "seed": 3}
    assert one({**made, "tokens": 9}).made == Made("chronicle", 3, 9)
    assert one({**made, "tokens": "limit", "reply_tokens": 4}).made == Made("chronicle", 3, "limit", 4)
    text = one({**made, "prompt": "p", "reply_tokens": 4})
    assert (text.prompt, text.made) == ("p", Made("chronicle", 3, None, 4))
    assert isinstance(text, SuiteText)
    assert isinstance(one({**made, "tokens": 9}), SuitePrompt)


BAD = {
    "a number": (3, 'wanted {"prompt": text}'),
    "nothing": ({}, 'wanted {"prompt": text}'),
    "both": ({"prompt": "a", "messages": CHAT}, 'wanted {"prompt": text}'),
    "prompt no text": ({"prompt": 3}, "prompt: got 3, wanted text"),
    "messages empty": ({"messages": []}, 'wanted {"prompt": text}'),
    "messages odd": ({"messages": [{"role": "user"}]}, 'wanted {"prompt": text}'),
    "reply no text": ({"prompt": "a", "reply": None}, "reply: got null, wanted text"),
    "typo": ({"prompt": "a", "replies": "b"}, "did you mean 'reply'?"),
    "unknown": ({"prompt": "a", "zzzz": "b"}, "known: id, category"),
    "size": ({"prompt": "a", "size": "huge"}, "size: got 'huge', wanted one of smoke, default, full"),
    "id": ({"id": "", "prompt": "a"}, 'id: got "", wanted a name'),
    "id with an escape": ({"id": "a\x1b", "prompt": "a"}, "wanted a name that can be printed"),
    "surrogate": ({"prompt": "ab\ud800"}, "half a surrogate pair at character 2"),
    "surrogate in a chat": ({"messages": [{"role": "user", "content": "\udc00"}]}, "half a surrogate pair"),
    "maker": ({"make": "novel", "seed": 1, "tokens": 3}, 'make: got "novel", wanted one of chronicle'),
    "maker a list": ({"make": ["log"], "seed": 1, "tokens": 3}, "wanted one of chronicle"),
    "tokens alone": ({"prompt": "a", "tokens": 3}, "'tokens' belongs to a text that is made"),
    "no length": ({"make": "log", "seed": 1}, "tokens: got 0, wanted a number of at least 1"),
    "reply too long": ({"make": "log", "seed": 1, "tokens": 5, "reply_tokens": 5}, "at least 6"),
    "not a number": ({"make": "log", "seed": True, "tokens": 5}, "seed: got true, wanted a number"),
    "two lengths": ({"make": "log", "seed": 1, "prompt": "a", "tokens": 5, "reply_tokens": 2}, "a made text has"),
    "two replies": ({"make": "log", "seed": 1, "prompt": "a", "reply": "b"}, "a made text has"),
    "no reply": ({"make": "log", "seed": 1, "prompt": "a"}, "reply_tokens: got 0, wanted a number of at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_item_is_one_line_with_its_place(name: str):
    row, says = BAD[name]
    with pytest.raises(ContentError) as err:
        one(row)
    assert str(err.value).startswith("f:1: ")
    assert says in str(err.value)
    assert "\n" not in str(err.value)


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    return path


def test_a_users_file_is_added_or_stands_alone(tmp_path: Path):
    mine = write(tmp_path / "mine.jsonl", {"prompt": "a"}, "", {"prompt": "b", "reply": "c", "category": "maths"})
    added, alone = load("smoke", [mine]), load("smoke", [mine], only_files=True)
    assert [x.id for x in added.prompts[-1:] + added.texts[-1:]] == ["mine.jsonl:1", "mine.jsonl:3"]
    assert [x.category for x in alone.prompts + alone.texts] == ["mine", "maths"]
    assert len(added.texts) == len(load("smoke").texts) + 1
    assert len({load("smoke").version, added.version, alone.version}) == 3
    assert alone.version.startswith("files-smoke-")


def test_plain_lines_are_prompts(tmp_path: Path):
    path = tmp_path / "mine.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo\u2028still two\n".encode())
    assert [x.prompt for x in load("smoke", [path], only_files=True).prompts] == ["one", "two\u2028still two"]
    assert read_prompts(path) == ["one", "two\u2028still two"]


def test_a_line_ends_at_a_newline_only(tmp_path: Path):
    """JSON may hold U+2028, U+0085 and the like unescaped; `splitlines` would break there."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a\u2028b\u0085c"}\n"d"\n', encoding="utf-8")
    assert read_prompts(path) == ["a\u2028b\u0085c", "d"]


@pytest.mark.parametrize("only_files", [True, False])
def test_files_that_cannot_be_used(tmp_path: Path, only_files: bool):
    with pytest.raises(UsageError, match="cannot be read"):
        load("smoke", [tmp_path / "gone.jsonl"], only_files)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(UsageError, match="cannot be read"):
        load("smoke", [tmp_path / "latin.jsonl"], only_files)
    with pytest.raises(ContentError, match=r"bad\.jsonl:2: not JSON"):
        load("smoke", [write(tmp_path / "bad.jsonl", {"prompt": "a"}, "{")], only_files)
    with pytest.raises(ContentError, match="holds no prompt"):
        load("smoke", [write(tmp_path / "empty.jsonl", "")], only_files)
    with pytest.raises(ContentError, match="holds no prompt"):
        load("smoke", [write(tmp_path / "empty.txt", " ")], only_files)


def test_ids_are_taken_once(tmp_path: Path):
    mine = write(tmp_path / "mine.jsonl", {"prompt": "a"}, {"id": "prose-ferry", "prompt": "b"})
    with pytest.raises(ContentError, match=r"mine\.jsonl:2: id 'prose-ferry' is taken \(by texts\.jsonl:1\)"):
        load("smoke", [mine])
    assert len(load("smoke", [mine], only_files=True).prompts) == 2


def test_sizes_and_files_have_to_be_named():
    with pytest.raises(UnknownName, match="did you mean 'smoke'"):
        load("smok")
    with pytest.raises(UsageError, match="no file was given"):
        load("smoke", only_files=True)


def test_the_prompts_of_record():
    prompts = own_prompts()
    assert len(prompts) == 64
    assert sum(isinstance(p, list) for p in prompts) == 14
    assert prompts[18] == "The function returns a list of all values that"
