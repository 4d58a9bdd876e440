"""Tokens first: the same text is the same ids on both sides, and sampled ids stay themselves.

To add a tokenizer backend: one file with a class of the `base.Tokenizer` protocol, and one line here.
"""

from __future__ import annotations

#: kind of tokenizer -> module and class, imported when it is opened.
BACKENDS: dict[str, str] = {
    "tokenizers": "onepolicy.tokens.fast:FastTokenizer",
    "transformers": "onepolicy.tokens.slow:SlowTokenizer",
    "sentencepiece": "onepolicy.tokens.sentencepiece_model:SentencePieceTokenizer",
    "tiktoken": "onepolicy.tokens.tiktoken_file:TiktokenTokenizer",
    "mistral": "onepolicy.tokens.mistral:MistralTokenizer",
    "gguf": "onepolicy.tokens.gguf_file:GgufTokenizer",
    "server": "onepolicy.tokens.server:ServerTokenizer",
}
