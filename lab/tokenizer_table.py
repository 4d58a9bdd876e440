"""What six tokenizer families do not preserve, as the Markdown table of docs/tokens.md.

    python lab/tokenizer_table.py DIR

DIR is what tokenizer_families made (`make tokenizers`); mistral-common's files lie in that package. Three questions:
which texts of the probe set change on the way to ids and back, which tokens do not survive alone, and which lists of
eight random ids do not survive. A token is an ordinary one here: added tokens are left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

import numpy as np

from onepolicy.tokens.base import Tokenizer, TokenRecord
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.probes import probes
from onepolicy.tokens.roundtrip import round_trip
from onepolicy.tokens.templates.check import check_template

LISTS, LENGTH, SEED = 2000, 8, 1
#: family -> the file below DIR, or in mistral-common's data.
FAMILIES = {
    "own byte-level BPE (`tiny`)": "tiny",
    "SmolLM2, its GGUF file": "smollm2-gguf",
    "Mistral v3, sentencepiece": "mistral_instruct_tokenizer_240323.model.v3",
    "Mistral, tekken": "tekken_240911.json",
    "DeepSeek, tokenizer.json": "deepseek",
    "Qwen, tiktoken file": "qwen",
}
_HEAD = (
    "| family | ids | texts that change | tokens that do not survive alone | lists of eight random ids that do not | "
    "chat template |\n|---|---|---|---|---|---|\n"
)


def target(name: str, built: Path) -> str:
    """What is opened. Raises `SystemExit` for a family that is not there."""
    import mistral_common

    places = (built / name, Path(mistral_common.__file__).parent / "data" / name)
    found = name if name == "tiny" else next((str(p) for p in places if p.exists()), None)
    if found is None:
        raise SystemExit(f"{built / name} is not there; run `make tokenizers`")
    return found


def ordinary(tokenizer: Tokenizer) -> list[int]:
    """Ids of the vocabulary without added tokens."""
    return [i for i in range(tokenizer.size) if tokenizer.exists(i) and i not in tokenizer.added]


def changed_texts(tokenizer: Tokenizer) -> str:
    """Texts of the probe set that are not what they were, by class of text and of change."""
    out, total = [], 0
    for group, texts in probes().items():
        trip = round_trip([TokenRecord(repr(text), reply_text=text) for text in texts], tokenizer)
        total += len(texts)
        out += [
            f"{found.n} of {group} ({cls}), as `{_code(found.examples[0]['record_id'])}`"
            for (_, cls, _), found in trip.groups.items()
        ]
    return "; ".join(out) or f"none of {total}"


def _code(text: str) -> str:
    return text[:30].replace("|", "\\|")


def lost(tokenizer: Tokenizer, lists: Iterable[Sequence[int]]) -> str:
    """The share of lists that do not come back, and as what."""
    trip = round_trip([TokenRecord(str(k), reply_ids=list(ids)) for k, ids in enumerate(lists)], tokenizer)
    found: Counter[str] = Counter()
    for (_, cls, _), group in trip.groups.items():
        found[cls.removesuffix("-at-end").removesuffix("-inside")] += group.n
    n = trip.checked["reply"]
    classes = ", ".join(f"{cls} {_share(count, n)}" for cls, count in found.most_common())
    return f"{_share(trip.differing['reply'], n)}: {classes}" if classes else f"none of {n:,}"


def _share(count: int, n: int) -> str:
    return f"{count / n:.2%}" if count / n >= 1e-4 else "<0.01%"


def random_lists(ids: Sequence[int]) -> list[list[int]]:
    draw = np.random.default_rng(SEED)
    return [draw.choice(ids, size=LENGTH).tolist() for _ in range(LISTS)]


def kept_history(tokenizer: Tokenizer) -> str:
    """Whether its template keeps history, by the next message."""
    if tokenizer.chat_template is None:
        return "none in the file"
    kept = check_template(None, tokenizer=tokenizer).prefix_preserving
    lost = [kind for kind, value in kept.items() if value is False]
    return f"rewrites history before: {', '.join(lost)}" if lost else "keeps history"


def row(family: str, tokenizer: Tokenizer) -> str:
    ids = ordinary(tokenizer)
    cells = [family, f"{tokenizer.size:,}", changed_texts(tokenizer), lost(tokenizer, ([i] for i in ids))]
    cells += [lost(tokenizer, random_lists(ids)), kept_history(tokenizer)]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    built = Path(sys.argv[1])
    print(f"{date.today().isoformat()}, `python lab/tokenizer_table.py {built}`:\n\n{_HEAD}", end="")
    for family, name in FAMILIES.items():
        print(row(family, open_tokenizer(target(name, built))), end="", flush=True)


if __name__ == "__main__":
    main()
