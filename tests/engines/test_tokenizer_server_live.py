"""SmolLM2's tokenizer three ways, for real: a vLLM server, transformers, and the GGUF file.

The server holds weights that mean nothing (`--load-format dummy`): only its tokenizer is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from server import serving

from onepolicy.tokens.open import open_tokenizer
from tokenizer_families import built, opened, random_ids, texts

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    options = ("--load-format", "dummy", "--max-model-len", "2048", "--enable-tokenizer-info-endpoint")
    with serving("--model", str(built("smollm2")), *options) as server:
        yield open_tokenizer(server.url)


@pytest.fixture(scope="module")
def transformers() -> Any:
    return open_tokenizer(f"transformers:{built('smollm2')}")


def test_the_same_texts_are_the_same_ids_three_ways(served: Any, transformers: Any) -> None:
    assert served.form == "vllm"
    gguf = opened("smollm2-gguf").encode(texts())
    assert served.encode(texts()) == transformers.encode(texts()) == gguf
    assert served.encode(["a  1984"]) == [[81, 256, 33, 41, 40, 36]]


def test_the_same_ids_are_the_same_texts_three_ways(served: Any, transformers: Any) -> None:
    ids = random_ids(transformers, 60)
    assert served.decode(ids) == transformers.decode(ids) == opened("smollm2-gguf").decode(ids)


def test_what_the_server_tells_of_itself_is_what_the_files_say(served: Any, transformers: Any) -> None:
    parts, files = served.parts(), transformers.parts()
    assert served.special_ids() == transformers.special_ids() == opened("smollm2-gguf").special_ids()
    same = {name for name, part in parts.items() if part.known and part.digest == files[name].digest}
    assert same == {"post_processor", "special_ids", "template_defaults", "chat_template"}
    assert served.size == transformers.size and served.token_bytes(33) == b"1"
