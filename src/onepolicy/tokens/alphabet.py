"""One spelling of a token for all backends, and its bytes.

A vocabulary of a byte-level tokenizer is spelled in GPT-2's printable alphabet (` the` is `Ġthe`): so do tokenizer.json
and GGUF files, and so are the bytes of tiktoken and tekken files written here. A sentencepiece vocabulary is spelled by
its pieces (`▁the`, `<0x0A>`), as tokenizer.json and GGUF files of such models do. Special tokens are spelled as their
text.
"""

from __future__ import annotations

SPACE = "▁"  # U+2581: sentencepiece's space


def _printable() -> dict[int, str]:
    """Byte -> character: printable ones stand for themselves, the others follow from U+0100."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(moved)}


PRINTABLE: dict[int, str] = _printable()
BYTE_OF: dict[str, int] = {character: byte for byte, character in PRINTABLE.items()}


def spell(data: bytes) -> str:
    """Bytes in GPT-2's printable alphabet.

    >>> spell(b" the")
    'Ġthe'
    """
    return "".join(PRINTABLE[byte] for byte in data)


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for; a token outside the alphabet is its own text."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


def byte_piece(piece: str) -> int | None:
    """The byte of a byte-fallback piece: `<0x0A>` -> 10; None for any other piece."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def piece_bytes(piece: str, space: str = SPACE) -> bytes:
    """The bytes of a sentencepiece piece inside a text: `▁the` -> ` the`, `<0x0A>` -> a newline."""
    byte = byte_piece(piece)
    return bytes([byte]) if byte is not None else piece.replace(space, " ").encode("utf-8", "surrogatepass")


def wordpiece_bytes(token: str, prefix: str = "##") -> bytes:
    """The bytes of a WordPiece token: `##ing` -> `ing`; a token that begins a word carries its space."""
    inside = bool(prefix) and token.startswith(prefix)
    return (token[len(prefix) :] if inside else f" {token}").encode()


def plain_bytes(token: str) -> bytes:
    """The token's own text."""
    return token.encode("utf-8", "surrogatepass")
