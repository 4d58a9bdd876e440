"""The same questions in token ids: the first id that differs, ids that merge over a seam, a doubled BOS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.codes import finding
from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.templates.conversations import assistant, user
from onepolicy.tokens.templates.edits import common_prefix
from onepolicy.tokens.templates.prefix import StepResult
from onepolicy.tokens.templates.render import ChatTemplate
from onepolicy.tokens.templates.stop import SPELLED
from onepolicy.types import Finding, Outcome, Severity


@dataclass(frozen=True, slots=True)
class IdResult:
    """Prompt ids + reply ids against the ids of the next render. `first`: first that differs, None if none does."""

    first: int | None
    n_prompt: int
    n_sampled: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "first_diff_id": self.first,
            "prompt_ids": self.n_prompt,
            "sampled_ids": self.n_sampled,
            "ids_in_context": list(self.ours),
            "ids_rendered": list(self.theirs),
        }


def id_results(tokenizer: Tokenizer, results: Sequence[StepResult]) -> list[IdResult | None]:
    """For each step that has two texts; the reply is encoded by itself, as an engine's own ids stand by themselves."""
    judged = [r for r in results if r.sides is not None and r.status in ("kept", "rewritten")]
    texts = [t for r in judged if r.sides for t in (r.sides.before, r.sides.sampled, r.sides.after)]
    ids = iter(tokenizer.encode(texts) if texts else [])
    found = {id(r): _compare(next(ids), next(ids), next(ids)) for r in judged}
    return [found.get(id(r)) for r in results]


def _compare(prompt: list[int], sampled: list[int], rendered: list[int]) -> IdResult:
    ours = [*prompt, *sampled]
    first = common_prefix(ours, rendered)
    if first == len(ours):
        return IdResult(None, len(prompt), len(sampled), (), ())
    near = slice(max(0, first - 3), first + 5)
    return IdResult(first, len(prompt), len(sampled), tuple(ours[near]), tuple(rendered[near]))


def seam_findings(results: Sequence[StepResult], ids: Sequence[IdResult | None]) -> list[Finding]:
    """Texts that are kept although encoding them anew gives other ids: a note, for the template is not at fault."""
    hit = [(r, i) for r, i in zip(results, ids, strict=True) if i and i.first is not None and r.status == "kept"]
    if not hit:
        return []
    (result, one), places = hit[0], [r.step.place for r, _ in hit]
    text = f"the template keeps the text of {places[0]}, but encoding it anew merges ids at position {one.first}"
    return [
        finding(
            "retokenization-drift",
            text,
            place=result.step.place,
            severity=Severity.INFO,
            outcome=Outcome.PASS,
            evidence={"class": "ids-merge-over-a-seam", "places": places[:20], **one.to_json()},
            advice="Keep prompt ids and sampled ids apart and join them as ids; do not encode the joined text.",
        )
    ]


def bos_findings(template: ChatTemplate, tokenizer: Tokenizer | None) -> list[Finding]:
    """`double-bos`: by the template alone (fail), or by the template and an encoder that adds one as well (warn: it
    depends on how the rendered text is encoded)."""
    text = template.render([user("Who is there?")], add_generation_prompt=True)
    bos = template.variables.get("bos_token")
    in_text = _leading(text, bos) if isinstance(bos, str) and bos else 0
    if in_text >= 2:
        return [_double("template", {"in_text": in_text}, f"the template writes {bos!r} {in_text} times", {})]
    if tokenizer is None:
        return []
    plain, added = (tokenizer.encode([text], add_special=add)[0] for add in (False, True))
    special = tokenizer.special_ids().get("bos")
    special = _put_in_front(plain, added) if special is None else special
    if special is None:
        return []
    counts = {"in_text": in_text, "plain": _count(plain, special), "add_special_tokens": _count(added, special)}
    if counts["plain"] >= 1 and counts["add_special_tokens"] > counts["plain"]:
        where = "the template writes a BOS and the tokenizer adds another when the rendered text is encoded as usual"
        warn = {"severity": Severity.WARN, "outcome": Outcome.PASS}
        return [_double("template and encode", counts, where, warn)]
    return []


def _put_in_front(plain: list[int], added: list[int]) -> int | None:
    """The id that the tokenizer puts right before a text, where no file says which is BOS."""
    n = next((n for n in range(1, len(added) - len(plain) + 1) if added[n : n + len(plain)] == plain), 0)
    return added[n - 1] if n else None


def _double(change: str, counts: Mapping[str, int], text: str, more: Mapping[str, Any]) -> Finding:
    return finding("double-bos", text, place="prompt", evidence={"class": change, "bos_count": dict(counts)}, **more)


def _leading(text: str, bos: str) -> int:
    n = 0
    while text.startswith(bos, n * len(bos)):
        n += 1
    return n


def _count(ids: list[int], special: int) -> int:
    return next((i for i, x in enumerate(ids) if x != special), len(ids))


def look_alike_findings(template: ChatTemplate, stop: str) -> list[Finding]:
    """A note: text in a message that spells the stop token goes into the prompt as it is, and is read as that token."""
    inside = f"a{stop}b"
    if not stop or inside not in template.render([user(inside)], add_generation_prompt=True):
        return []
    text = f"content that spells {stop!r} is rendered as it is; an encoder that parses special tokens takes it for one"
    note = {"severity": Severity.INFO, "outcome": Outcome.PASS}
    return [
        finding(
            "special-token-look-alike", text, place="content", evidence={"class": "not-escaped", "token": stop}, **note
        )
    ]


def control_token_findings(template: ChatTemplate, tokenizer: Tokenizer | None, stop: str) -> list[Finding]:
    """Control tokens that the template writes and the tokenizer has not as one token: they are read as plain letters.
    A failure for the stop token, at which nothing then stops; a note for others, which some models spell on purpose."""
    if tokenizer is None:
        return []
    text = template.render([user("Who is there?"), assistant("I am.")], add_generation_prompt=False)
    written: list[str] = [m.group() for m in SPELLED.finditer(text)]
    spelled = [t for t in dict.fromkeys([stop, *written]) if t and (t == stop or t.startswith("<"))]
    counts = {t: len(ids) for t, ids in zip(spelled, tokenizer.encode(spelled) if spelled else [], strict=True)}
    unknown = [t for t in spelled if counts[t] != 1]
    if not unknown:
        return []
    fatal = stop in unknown
    shown = ", ".join(f"{t!r} ({counts[t]} tokens)" for t in unknown[:4])
    said = "the stop token and others" if fatal and len(unknown) > 1 else "the stop token" if fatal else "markers"
    message = f"the template writes {said} that the tokenizer has not as one token: {shown}"
    evidence = {"class": "stop-token" if fatal else "markers", "tokens": unknown, "stop": stop, "counts": counts}
    weight: dict[str, Any] = {} if fatal else {"severity": Severity.INFO, "outcome": Outcome.PASS}
    return [finding("control-tokens-unknown", message, place="chat template", evidence=evidence, **weight)]
