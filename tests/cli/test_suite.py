"""`onepolicy suite`: list, export, import, from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from onepolicy.cli.main import command
from onepolicy.engines.open import open_engine
from onepolicy.storage import read, write
from onepolicy.suite import load

FAKE = "fake:?seed=1"
EXPORT = ("suite", "export", "--tokenizer", FAKE, "--size", "smoke")


@pytest.fixture
def ids(cli: Command, tmp_path: Path) -> Path:
    """The smoke texts as bytes."""
    out = tmp_path / "ids.jsonl"
    assert cli(*EXPORT, "-o", out).code == 0
    return out


@pytest.fixture
def scored(ids: Path, tmp_path: Path) -> Path:
    """As a trainer returns them: names, ids, log-probs, in another order and nothing else."""
    rollouts = read(ids)
    with open_engine(FAKE) as engine:
        values = rollouts.with_scoring("old", engine.score(rollouts))
    full = tmp_path / "full.jsonl"
    write(values, full)
    rows = [json.loads(line) for line in full.read_text(encoding="utf-8").splitlines()]
    out = tmp_path / "scored.jsonl"
    kept = ("record_id", "token_ids", "old_logprobs")
    lines = [json.dumps({k: row[k] for k in kept}) for row in reversed(rows)]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return out


def test_list_counts_what_load_gives(cli: Command):
    ran = cli("suite", "list")
    assert (ran.code, ran.err) == (0, "")
    sizes = {line.split()[0]: line.split()[1:] for line in ran.out.splitlines()[1:4]}
    for size, (prompts, texts, _, version) in sizes.items():
        suite = load(size)
        assert (int(prompts), int(texts), version) == (len(suite.prompts), len(suite.texts), suite.version)
    assert "\nchinese " in ran.out and "yours" not in ran.out


def test_list_of_ones_own(cli: Command, tmp_path: Path):
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "a", "reply": "b"}\n{"prompt": "c"}\n', encoding="utf-8")
    ran = cli("suite", "list", "--file", mine, "--only-files")
    assert ran.code == 0
    assert ran.out.splitlines()[1].split()[:4] == ["smoke", "1", "1", "1"]
    assert ran.out.splitlines()[-1].split() == ["mine", "1+1", "1+1", "1+1", "yours"]


def test_export_writes_ids(cli: Command, tmp_path: Path):
    out = tmp_path / "ids.parquet"
    ran = cli(*EXPORT, "-o", out)
    assert (ran.code, ran.err) == (0, "")
    rollouts = read(out)
    assert f"{out}: 8 texts, {rollouts.n_tokens:,} tokens, 8 clusters; suite {load('smoke').version}\n" in ran.out
    assert "left out" not in ran.out
    assert bytes(rollouts.token_ids[rollouts.sequence(1)].tolist()).startswith(b"def runs(values):")
    assert not rollouts.drawn.any()


def test_export_is_the_same_each_time(cli: Command, ids: Path, tmp_path: Path):
    again = tmp_path / "again.jsonl"
    assert cli(*EXPORT, "-o", again).code == 0
    assert again.read_bytes() == ids.read_bytes()


def test_what_is_too_long_is_named(cli: Command, tmp_path: Path):
    ran = cli(*EXPORT, "--max-length", 300, "-o", tmp_path / "ids.jsonl")
    assert ran.code == 0
    assert "left out: prose-ferry: " in ran.out
    assert " tokens, and there is room for 300\n" in ran.out
    assert max(read(tmp_path / "ids.jsonl").lengths) <= 300


def test_export_of_ones_own_texts(cli: Command, tmp_path: Path):
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "2+2=", "reply": "4"}\n', encoding="utf-8")
    for more, count in ((["--only-files"], 1), ([], 9)):
        out = tmp_path / f"{count}.jsonl"
        assert cli(*EXPORT, "--file", mine, *more, "-o", out).code == 0
        rollouts = read(out)
        assert len(rollouts) == count
        assert bytes(rollouts.token_ids[rollouts.sequence(count - 1)].tolist()) == b"2+2=4"
        assert rollouts.record("record_id", count - 1) == "mine.jsonl:1"


def test_export_as_text(cli: Command, tmp_path: Path):
    out = tmp_path / "texts.jsonl"
    ran = cli("suite", "export", "--text", "--size", "full", "-o", out)
    assert ran.code == 0
    assert "left out: long-context-limit: " in ran.out
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n") if line]
    assert len(rows) == len(load("full").texts) - 1
    assert {"id", "group", "category", "prompt", "reply"} <= set(rows[0])


def test_import_keeps_what_was_sent(cli: Command, ids: Path, scored: Path, tmp_path: Path):
    out = tmp_path / "scored.parquet"
    ran = cli("suite", "import", scored, "--of", ids, "-o", out, "--dtype", "float32")
    assert (ran.code, ran.err) == (0, "")
    assert f"{out}: 8 texts, " in ran.out
    back, sent = read(out), read(ids)
    assert back.record_ids() == sent.record_ids()
    assert set(back.records) == set(sent.records)
    assert (back.scorings["old"].semantics, back.scorings["old"].dtype) == ("raw", "float32")
    assert not back.drawn.any()


def test_two_imports_are_compared(cli: Command, ids: Path, scored: Path, tmp_path: Path):
    a, b = tmp_path / "a.parquet", tmp_path / "b.parquet"
    for out in (a, b):
        assert cli("suite", "import", scored, "--of", ids, "-o", out, "--dtype", "float32").code == 0
    ran = cli("compare", a, b, "--a", "old", "--b", "old", "--view", "fixed")
    assert ran.code == 3  # eight clusters decide nothing
    assert ran.out.startswith(" INCONCLUSIVE ")


def spoiled(scored: Path, change: Any) -> Path:
    rows = [json.loads(line) for line in scored.read_text(encoding="utf-8").splitlines()]
    change(rows)
    scored.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return scored


SPOILS: dict[str, tuple[Any, str]] = {
    "missing": (lambda rows: rows.pop(), "record 'prose-ferry' is missing from the scored file"),
    "other ids": (lambda rows: rows[7]["token_ids"].__setitem__(5, 7), "record 'prose-ferry': "),
    "wrong length": (lambda rows: rows[0]["old_logprobs"].pop(), "too few values"),
    "one too few": (lambda rows: [row["old_logprobs"].pop(0) for row in rows], "index 0 is null, put a null first"),
    "another name": (lambda rows: rows[3].__setitem__("record_id", "x"), "is missing from the scored file"),
    "a hole": (lambda rows: rows[7]["old_logprobs"].__setitem__(-1, None), "reply tokens have no 'old_logprobs'"),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_bad_return_is_one_line(cli: Command, ids: Path, scored: Path, tmp_path: Path, name: str):
    change, says = SPOILS[name]
    ran = cli("suite", "import", spoiled(scored, change), "--of", ids, "-o", tmp_path / "out.parquet")
    assert ran.code == 4
    assert ran.err.startswith(f"error: {scored}:")
    assert says in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "out.parquet").exists()


BAD: dict[str, tuple[str, int, str]] = {
    "no action": ("suite", 2, ""),
    "unknown action": ("suite exprot", 2, "Did you mean 'export'"),
    "neither": ("suite export -o {d}/x.jsonl", 2, "wanted --tokenizer MODEL"),
    "both": ("suite export -o {d}/x.jsonl --text --tokenizer fake:", 2, "wanted --tokenizer MODEL"),
    "no model": (
        "suite export -o {d}/x.jsonl --tokenizer {d}/gone",
        2,
        "no such directory, and no packaged model (tiny",
    ),
    "no model of an engine": ("suite export -o {d}/x.jsonl --tokenizer hf:{d}/gone", 2, "no such directory"),
    "no tokenizer": ("suite export -o {d}/x.jsonl --tokenizer recorded:{d}/ids.jsonl", 2, "recorded:"),
    "size": ("suite export -o {d}/x.jsonl --tokenizer fake: --size smok", 2, "did you mean 'smoke'"),
    "suffix": ("suite export -o {d}/x.txt --tokenizer fake:", 2, "wanted one of .parquet"),
    "suffix of text": ("suite export -o {d}/x.parquet --text", 2, "wanted one of .jsonl"),
    "exists": ("suite export -o {d}/ids.jsonl --tokenizer fake:", 2, "exists; --overwrite replaces it"),
    "exists, text": ("suite export -o {d}/ids.jsonl --text", 2, "exists; --overwrite replaces it"),
    "import exists": ("suite import {d}/ids.jsonl --of {d}/ids.jsonl -o {d}/ids.jsonl", 2, "exists; --overwrite"),
    "import nothing": ("suite import {d}/gone.jsonl --of {d}/ids.jsonl -o {d}/x.jsonl", 2, "no such file"),
    "import unscored": ("suite import {d}/ids.jsonl --of {d}/ids.jsonl -o {d}/x.jsonl", 4, "no column 'old_logprobs'"),
    "dtype": (
        "suite import {d}/ids.jsonl --of {d}/ids.jsonl -o {d}/x.jsonl --dtype float33",
        2,
        "did you mean 'float32'",
    ),
    "file": ("suite list --file {d}/gone.jsonl", 2, "cannot be read"),
    "only nothing": ("suite list --only-files", 2, "no file was given"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(cli: Command, ids: Path, name: str):
    words, code, says = BAD[name]
    ran = cli(*words.format(d=ids.parent).split())
    assert ran.code == code, ran
    assert says in ran.err
    assert ran.err.count("\n") == (1 if says else 0)


def test_overwrite_replaces(cli: Command, ids: Path):
    before = ids.read_bytes()
    assert cli(*EXPORT, "--max-length", 300, "-o", ids, "--overwrite").code == 0
    assert ids.read_bytes() != before


FLAGS = """
export --output/-o required
export --tokenizer
export --text
export --size
export --file
export --only-files
export --max-length
export --overwrite
import SCORED required
import --of required
import --output/-o required
import --side
import --dtype
import --overwrite
list --file
list --only-files
"""


def test_the_flags_are_frozen():
    found: list[str] = []
    root: Any = command()
    for name, action in sorted(root.commands["suite"].commands.items()):
        for p in action.params:
            names = "/".join([*p.opts, *p.secondary_opts]) if p.param_type_name == "option" else p.name.upper()
            found.append(f"{name} {names}{' required' if p.required else ''}")
    assert found == FLAGS.split("\n")[1:-1]


@pytest.mark.parametrize("words", [["--help"], ["export", "--help"], ["list"]])
def test_help_and_list_load_nothing_heavy(words: list[str]):
    code = f"from onepolicy.cli.main import run; run(['suite', *{words!r}]); import sys; print(sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = ran.stdout.splitlines()[-1]
    assert "'typer'" in loaded
    assert not any(f"'{name}'" in loaded for name in ("torch", "pyarrow", "vllm", "transformers"))


@pytest.mark.engines
def test_export_needs_no_torch(tmp_path: Path):
    """The packaged model's tokenizer, by name and by an engine's spec, without a word of the tokenizer on stderr."""
    out = tmp_path / "ids.jsonl"
    argv = ["suite", "export", "-o", str(out), "--tokenizer", "vllm:tiny?dtype=float32"]
    code = f"""
import sys
sys.modules["torch"] = None  # importing it fails
from onepolicy.cli.main import run
sys.exit(run({argv!r}))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "left out: long-reply-4k: 4,133 tokens, and there is room for 2,048" in ran.stdout
    assert "tokens" not in ran.stderr
    assert max(read(out).lengths) <= 2048
