"""Round trip of sampled ids against the bare `encode_batch` of the same tokenizer on the same texts, one core.

The texts are this project's own pages, sources and suite; SmolLM2's tokenizer if `make models` made it, and the
packaged one. A file is streamed by a process that begins with nothing known, and one ten times as long: peak memory
must be the same.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / "build" / "models" / "smollm2"
#: Characters of a prompt and of a reply.
PROMPT, REPLY = 600, 4000
TOKENS = 1_000_000

_STREAM = """
import resource, sys, time
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.reading import RecordStream
from onepolicy.tokens.roundtrip import round_trip
tokenizer = open_tokenizer(sys.argv[1])
began = time.process_time()
found = round_trip(RecordStream(sys.argv[2]), tokenizer)
took = time.process_time() - began
print(found.n_tokens, took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, sum(found.differing.values()))
"""


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from onepolicy import models

    for target in [str(SMOLLM2)] * SMOLLM2.is_dir() + [str(models.path("tiny"))]:
        _one(target)


def _one(target: str) -> None:
    from tokenizers import Tokenizer

    from onepolicy.tokens.fidelity import assert_token_fidelity
    from onepolicy.tokens.open import open_tokenizer
    from onepolicy.tokens.roundtrip import round_trip

    bare, ours = Tokenizer.from_file(str(Path(target) / "tokenizer.json")), open_tokenizer(target)
    texts, records = _records(bare)
    n = sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in records)
    sampled = _resampled(records, bare)
    found = round_trip(records, ours)
    assert not any(found.differing.values()), found.differing
    differing = round_trip(sampled, ours).differing
    work: dict[str, Callable[[], Any]] = {
        "bare encode_batch": lambda: bare.encode_batch(texts, add_special_tokens=False),
        "bare encode_batch_fast (no offsets)": lambda: bare.encode_batch_fast(texts, add_special_tokens=False),
        "round trip, all is well": lambda: round_trip(records, ours),
        f"round trip, {differing['reply']} of {len(records)} replies differ": lambda: round_trip(sampled, ours),
        "assert_token_fidelity, 16 rollouts at a time": lambda: _asserted(assert_token_fidelity, records, ours),
    }
    seconds = _best(work)
    print(f"tokens: {Path(target).name}, {n:,} ids in {len(records)} records, one core, words known")
    for name, took in seconds.items():
        ratio = took / seconds["bare encode_batch"]
        print(f"  {name:52s} {n / took / 1e6:6.2f} M tokens/s   {ratio:5.2f} x encode_batch")
    _stream(target, records)


def _records(bare: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Texts, prompt and reply apart, cut before a word; their ids as records."""
    text = _corpus()
    texts: list[str] = []
    at = n = 0
    while n < TOKENS and at < len(text):
        for size in (PROMPT, REPLY):
            end = _before_a_word(text, at + size)
            texts.append(text[at:end])
            at = end
        n += sum(len(e.ids) for e in bare.encode_batch(texts[-2:], add_special_tokens=False))
    texts = texts[: len(texts) // 2 * 2]
    ids = [e.ids for e in bare.encode_batch(texts, add_special_tokens=False)]
    records = [{"id": str(k), "prompt_ids": ids[2 * k], "response_ids": ids[2 * k + 1]} for k in range(len(ids) // 2)]
    return texts, records


def _corpus() -> str:
    patterns = ("docs/*.md", "src/onepolicy/**/*.py", "src/onepolicy/suite/**/*.jsonl", "tests/**/*.py", "lab/*.py")
    files = sorted(f for pattern in patterns for f in ROOT.glob(pattern))
    return "".join(f.read_text(encoding="utf-8") for f in files)


def _before_a_word(text: str, at: int) -> int:
    """A place from there on that no tokenizer merges across: a letter, then a space, then a letter."""
    while at + 1 < len(text) and not (text[at - 1].isalpha() and text[at] == " " and text[at + 1].isalpha()):
        at += 1
    return min(at + (at + 1 >= len(text)), len(text))


def _resampled(records: list[dict[str, Any]], bare: Any) -> list[dict[str, Any]]:
    """As drawn at temperature 1: three replies in ten have a word in other pieces at one place."""
    rng, out = random.Random(1), []
    for record in records:
        ids = list(record["response_ids"])
        at = rng.randrange(len(ids))
        text = bare.decode([ids[at]], skip_special_tokens=False)
        if rng.random() < 0.3 and len(text) > 1 and "\ufffd" not in text:
            pieces = [i for c in text for i in bare.encode(c, add_special_tokens=False).ids]
            ids[at : at + 1] = pieces
        out.append({**record, "response_ids": ids})
    return out


def _asserted(check: Callable[..., Any], records: list[dict[str, Any]], tokenizer: Any) -> None:
    for k in range(0, len(records), 16):
        check(records[k : k + 16], decode_with=tokenizer)


def _best(work: dict[str, Callable[[], Any]], times: int = 4) -> dict[str, float]:
    """CPU seconds of the fastest run of each, in turns: others work on this machine too."""
    seconds = dict.fromkeys(work, float("inf"))
    for _ in range(times):
        for name, run in work.items():
            began = time.process_time()
            run()
            seconds[name] = min(seconds[name], time.process_time() - began)
    return seconds


def _stream(target: str, records: list[dict[str, Any]]) -> None:
    """A file with log-probs beside the ids, and one ten times as long; CPU seconds with the reading of the JSON."""
    with tempfile.TemporaryDirectory() as folder:
        for times in (1, 10):
            path = Path(folder) / f"{times}.jsonl"
            with path.open("w") as file:
                for _ in range(times):
                    file.writelines(json.dumps(_with_logprobs(r)) + "\n" for r in records)
            command = [sys.executable, "-c", _STREAM, target, str(path)]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            n, took, mib, _ = (float(x) for x in ran.stdout.split())
            size = path.stat().st_size / 2**20
            speed = f"{n / took / 1e6:6.2f} M tokens/s"
            print(f"  {f'stream of {size:.0f} MiB JSON lines with log-probs':52s} {speed}   {mib:5.0f} MiB at most")


def _with_logprobs(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "rollout_logprobs": [-0.123456 - i % 7 for i in record["response_ids"]]}
