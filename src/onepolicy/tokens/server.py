"""A running server's own tokenizer, by its `/tokenize` and `/detokenize`: vLLM, SGLang and llama.cpp.

Which of the three it is shows in the answers (`FORMS`). A server gives ids and texts and few of its rules, so most
parts are unknown here; how it behaves can still be compared. What costs a request is asked when it is needed: the size
of a vocabulary that no endpoint tells is found by asking for ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from onepolicy.errors import ContentError, EngineError, OnepolicyError, UnknownName, UsageError
from onepolicy.tokens import directory
from onepolicy.tokens.base import PARTS, AddedToken, Part
from onepolicy.tokens.batches import bad_ids, is_id, texts_of
from onepolicy.tokens.directory import Around
from onepolicy.tokens.server_requests import Server
from onepolicy.tokens.target import split_options

_AT_ONCE, _PER_REQUEST = 8, 128  # requests under way; texts in one request, where a server takes many
_LARGEST_VOCABULARY = 2**21
_TOLD = "a server tells ids and texts, and not this; give its tokenizer file to compare it"


@dataclass(frozen=True, slots=True)
class Form:
    """How one kind of server is asked. `text`, `special`: names in a request for ids; `answer`: of a text.

    `parse`, `skip`: names of the switches for special tokens, empty where it has none. `many`: it takes lists.
    """

    text: str
    special: str
    answer: str
    parse: str = ""
    skip: str = ""
    many: bool = False


FORMS: dict[str, Form] = {
    "vllm": Form("prompt", "add_special_tokens", "prompt"),
    "sglang": Form("prompt", "add_special_tokens", "text", skip="skip_special_tokens", many=True),
    "llamacpp": Form("content", "add_special", "content", parse="parse_special"),
}


class ServerTokenizer:
    """`http://HOST:PORT` or https, a path before the endpoints included.

    Options: `form` (`vllm`, `sglang`, `llamacpp`; else found out), `model` (where a server has several), `timeout`
    (seconds for one answer, 30), `api_key_env` (the environment variable that holds the key).

    Errors: `UsageError` for a bad address or a server without these endpoints; `EngineError`, `EngineTimeout` for one
    that does not answer, each in one line.
    """

    BACKEND: ClassVar[str] = "server"

    def __init__(self, target: str) -> None:
        address, options = split_options(target, self.BACKEND, ("form", "model", "timeout", "api_key_env"))
        self.name = target
        self._server = Server.at(address, options)
        self._named = {"model": options["model"]} if options.get("model") else {}
        if (said := options.get("form")) and said not in FORMS:
            raise UnknownName("form of a tokenizer server", said, FORMS)
        self.form = said or self._recognised()
        self._form = FORMS[self.form]

    def _recognised(self) -> str:
        """The form of the server's answers, asked with a body that fits all of them. Errors: `UsageError`."""
        names = {"prompt": "a", "content": "a", "add_special_tokens": False, "add_special": False}
        ids = self._tokens(self._server.post("/tokenize", {**names, **self._named}))
        answer = self._server.post("/detokenize", {"tokens": ids, **self._named})
        found = [name for name, form in FORMS.items() if isinstance(answer, dict) and form.answer in answer]
        if len(found) != 1:
            keys = ", ".join(answer) if isinstance(answer, dict) else type(answer).__name__
            wanted = ", ".join(f"{form.answer} ({name})" for name, form in FORMS.items())
            raise UsageError(f"{self._server}: /detokenize answers with {keys or 'nothing'}, wanted one of {wanted}")
        return found[0]

    def _tokens(self, answer: Any) -> Any:
        if not isinstance(answer, dict) or not isinstance(answer.get("tokens"), list):
            raise EngineError(f"{self._server}: /tokenize answers {str(answer)[:100]!r}, wanted an object with tokens")
        return answer["tokens"]

    def encode(self, texts: Sequence[str], *, add_special: bool = False, parse_special: bool = True) -> list[list[int]]:
        """See `Tokenizer.encode`. Errors: `UsageError` for plain reading of special tokens where there is no switch."""
        form, checked = self._form, texts_of(self.name, texts)
        if not parse_special and not form.parse:
            raise UsageError(
                f"{self._server}: a server of the form {self.form} always reads special tokens from a text"
            )
        body = {form.special: add_special, **self._named} | ({form.parse: parse_special} if form.parse else {})
        if form.many:
            return self._in_lists(checked, lambda some: self._tokens(self._ask({form.text: some, **body})))
        return self._at_once(lambda text: self._ids(self._ask({form.text: text, **body})), checked)

    def _ask(self, body: Mapping[str, Any]) -> Any:
        return self._server.post("/tokenize", body)

    def _ids(self, answer: Any) -> list[int]:
        return [int(t["id"]) if isinstance(t, dict) else int(t) for t in self._tokens(answer)]

    def _in_lists(self, items: list[Any], ask: Any) -> list[Any]:
        parts = [items[i : i + _PER_REQUEST] for i in range(0, len(items), _PER_REQUEST)]
        out = [one for part in self._at_once(ask, parts) for one in part]
        if len(out) != len(items):
            raise EngineError(f"{self._server}: {len(out)} answers to {len(items)} texts")
        return out

    def _at_once(self, ask: Any, items: Sequence[Any]) -> list[Any]:
        if len(items) < 2:
            return [ask(item) for item in items]
        with ThreadPoolExecutor(min(_AT_ONCE, len(items))) as pool:
            return list(pool.map(ask, items))

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """See `Tokenizer.decode`. Errors: `UsageError` for skipping special tokens where there is no switch."""
        form = self._form
        if problem := bad_ids(ids):
            raise ContentError(f"{self._server}: {problem}")
        if skip_special and not form.skip:
            raise UsageError(f"{self._server}: a server of the form {self.form} always shows special tokens in a text")
        lists = [[int(i) for i in one] for one in ids]
        body = {**self._named} | ({form.skip: skip_special} if form.skip else {})
        filled = iter(self._texts([one for one in lists if one], body))
        return [next(filled) if one else "" for one in lists]

    def _texts(self, lists: list[list[int]], body: Mapping[str, Any]) -> list[str]:
        def ask(tokens: Any) -> Any:
            answer = self._server.post("/detokenize", {"tokens": tokens, **body})
            if not isinstance(answer, dict) or self._form.answer not in answer:
                raise EngineError(f"{self._server}: /detokenize answers {str(answer)[:100]!r}")
            return answer[self._form.answer]

        return self._in_lists(lists, ask) if self._form.many else self._at_once(ask, lists)

    def token_bytes(self, token_id: int) -> bytes | None:
        """See `Tokenizer.token_bytes`; None as well for a part of a character, which no server shows alone.

        The token is shown behind another one: alone, its space in front could be lost.
        """
        if not self.exists(token_id):
            return None
        before = self.encode(["a"])[0]
        alone, both = self.decode([before, [*before, token_id]])
        text = both.removeprefix(alone)
        return None if "\ufffd" in text else text.encode()

    def exists(self, token_id: int) -> bool:
        """See `Tokenizer.exists`. Where no endpoint tells the size, an id exists that is shown as some text."""
        if not is_id(token_id):
            return False
        if self._told is not None:
            return token_id < self._told
        return self._shown(token_id)

    def _shown(self, token_id: int) -> bool:
        try:
            return bool(self.decode([[token_id]])[0])
        except OnepolicyError:
            return False

    @cached_property
    def size(self) -> int:
        """Ids run to below this: as told, else found by halving, to which a hole looks like the end."""
        if self._told is not None:
            return self._told
        low, high = 0, _LARGEST_VOCABULARY
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._shown(middle) else (low, middle)
        return low + 1

    @cached_property
    def _told(self) -> int | None:
        """The size that llama.cpp says in its list of models."""
        if self.form != "llamacpp":
            return None
        listed = self._server.get("/v1/models")
        for model in (listed or {}).get("data") or []:
            if isinstance(n := (model.get("meta") or {}).get("n_vocab"), int):
                return n
        return None

    @cached_property
    def _info(self) -> Mapping[str, Any]:
        """What the server says of its tokenizer: vLLM's `/tokenizer_info` where it is on, llama.cpp's `/props`."""
        path = {"vllm": "/tokenizer_info", "llamacpp": "/props"}.get(self.form)
        said = self._server.get(path) if path else None
        return said if isinstance(said, dict) else {}

    @property
    def chat_template(self) -> str | None:
        """As the server says, None where it says nothing."""
        said = self._info.get("chat_template")
        return said if isinstance(said, str) else None

    @cached_property
    def added(self) -> Mapping[int, AddedToken]:
        """As far as vLLM's `/tokenizer_info` tells; without their flags."""
        said = self._info.get("added_tokens_decoder")
        found = said.items() if isinstance(said, dict) else ()
        return {int(i): AddedToken(int(i), str(text)) for i, text in found if str(i).isdigit()}

    def special_ids(self) -> Mapping[str, int | None]:
        """From the tokens that the server names; each must be one id."""
        return self._special

    @cached_property
    def _special(self) -> Mapping[str, int | None]:
        texts = {role: self._info.get(f"{role}_token") for role in directory.ROLES}
        named = {role: text for role, text in texts.items() if isinstance(text, str) and text}
        ids = dict(zip(named, self.encode(list(named.values())), strict=True))
        return {role: ids[role][0] if len(ids.get(role, ())) == 1 else None for role in directory.ROLES}

    def parts(self) -> Mapping[str, Part]:
        """See `Tokenizer.parts`. Known: what is put around a text, and what the server says of itself."""
        return self._parts

    @cached_property
    def _parts(self) -> Mapping[str, Part]:
        out = {name: Part(known=False, why=_TOLD) for name in PARTS}
        out["post_processor"] = self._around_text()
        tokens = {f"{role}_token": self._info.get(f"{role}_token") for role in directory.ROLES}
        if any(tokens.values()):
            out["special_ids"] = Part(dict(self.special_ids()))
            beside = Around(tokens={k: v for k, v in tokens.items() if v}, specials_known=True)
            out["template_defaults"] = beside.parts()["template_defaults"]
        if self.chat_template is not None:
            out["chat_template"] = Part(self.chat_template)
        return out

    def _around_text(self) -> Part:
        """What is put around a text, read off one."""
        plain, full = self.encode(["a"])[0], self.encode(["a"], add_special=True)[0]
        starts = [i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain]
        if len(starts) != 1:
            return Part(known=False, why=_TOLD)
        sides = {"before": full[: starts[0]], "after": full[starts[0] + len(plain) :]}
        texts = {side: self.decode([[i] for i in ids]) for side, ids in sides.items()}
        return Part(texts if any(sides.values()) else None)
