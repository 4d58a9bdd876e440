"""The child that renders: misbehaving ends in one clear line, the child is dead, and the next render works."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from onepolicy.errors import UsageError
from onepolicy.tokens.templates.process import KINDS, Child, Limits, TemplateFailure
from onepolicy.tokens.templates.render import FROZEN, ChatTemplate

TALK = [{"role": "user", "content": "Hi"}]
SMALL = Limits(cpu_seconds=1, wall_seconds=20, memory_mb=160, output_chars=100_000)
_GROW = "{% set ns = namespace(x='a' * 999) %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
_LIST = (
    "{% set ns = namespace(x=[1] * 999) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x[0] }}"
)
_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

#: template -> kind of failure, and a word of its message
BAD: dict[str, tuple[str, str]] = {
    _LOOP: ("cpu", "more than 1 s of CPU"),
    "{% macro f(n) %}{% for i in range(9) %}{{ f(n - 1) if n }}{% endfor %}{% endmacro %}{{ f(30) }}": ("cpu", "loop"),
    _GROW: ("memory", "160 MB"),
    _LIST: ("memory", "160 MB"),
    "{{ '%999999999d' % 1 }}": ("memory", "160 MB"),
    "{{ 'x' * 10 ** 9 }}": ("memory", "160 MB"),
    "{% for a in range(99999) %}{{ 'x' * 99 }}{% endfor %}": ("output", "100,000 characters"),
    "one\n{% for %}": ("syntax", "line 2"),
    "{% if true %}": ("syntax", "no valid Jinja"),
    "{{ 1 | no_such_filter }}": ("syntax", "no_such_filter"),
    "\n\n{{ raise_exception('roles must\n take turns') }}": (
        "refused",
        "line 3 refuses the conversation: roles must take",
    ),
    "{{ nobody.name.first }}": ("undefined", "'nobody' is undefined"),
    "a\n{{ 'a' + 1 }}": ("error", "line 2 fails: TypeError"),
    "{{ 1 / 0 }}": ("error", "ZeroDivisionError"),
    "{{ range(10 ** 9) | list }}": ("error", "Range too big"),
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": ("error", "RecursionError"),
    "{{ ''.__class__.__mro__ }}": ("security", "sandbox"),
    "{{ messages.append(1) }}": ("security", "sandbox"),
    "{{ messages[0].update({'role': 'x'}) }}": ("security", "sandbox"),
    "{{ cycler.__init__.__globals__ }}": ("security", "sandbox"),
    "{% include '/etc/passwd' %}": ("error", "no loader"),
    "{{ " + "(" * 4000 + "1" + ")" * 4000 + " }}": ("error", "RecursionError"),
}


@pytest.fixture(scope="module")
def child():
    with Child(SMALL) as child:
        yield child


@pytest.mark.parametrize("text", BAD, ids=lambda t: t[:40])
def test_what_goes_wrong_is_one_line_and_the_next_render_works(child: Child, text: str) -> None:
    kind, says = BAD[text]
    with pytest.raises(TemplateFailure) as caught:
        ChatTemplate(text, child=child).render(TALK)
    assert caught.value.kind == kind and kind in KINDS
    assert says in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert ChatTemplate("{{ messages[0].content }}", child=child).render(TALK) == "Hi"


def test_one_child_serves_many_renders_and_is_replaced_only_after_a_kill() -> None:
    with Child(SMALL) as child:
        template = ChatTemplate("{{ messages[0].content }}", child=child)
        for i in range(50):
            assert template.render([{"role": "user", "content": str(i)}]) == str(i)
        first, starts = child.pid, child.starts
        with pytest.raises(TemplateFailure, match="valid Jinja"):
            ChatTemplate("{% if %}", child=child).render(TALK)
        assert (child.pid, child.starts, starts) == (first, 1, 1)
        with pytest.raises(TemplateFailure, match="memory"):
            ChatTemplate(_GROW, child=child).render(TALK)
        assert first is not None and not _alive(first)
        assert template.render([{"role": "user", "content": "again"}]) == "again"
        assert child.starts == 2 and child.pid != first


def test_the_wall_clock_stops_a_child_that_does_not_answer() -> None:
    with Child(Limits(cpu_seconds=100, wall_seconds=0.5)) as child:
        ChatTemplate("x", child=child).render(TALK)
        pid, began = child.pid, time.monotonic()
        with pytest.raises(TemplateFailure, match=r"no answer after 0\.5 s"):
            ChatTemplate(_LOOP, child=child).render(TALK)
        assert time.monotonic() - began < 10 and pid is not None and not _alive(pid)


def test_a_child_that_is_killed_from_outside_is_replaced() -> None:
    with Child() as child:
        template = ChatTemplate("{{ messages[0].content }}", child=child)
        template.render(TALK)
        assert child.pid is not None
        os.kill(child.pid, 9)
        time.sleep(0.1)
        assert template.render([{"role": "user", "content": "on"}]) == "on"


def test_closing_and_garbage_collection_end_the_child() -> None:
    child = Child()
    ChatTemplate("x", child=child).render(TALK)
    pid = child.pid
    child.close()
    child.close()
    assert pid is not None and not _alive(pid)
    other = Child()
    ChatTemplate("x", child=other).render(TALK)
    pid = other.pid
    del other
    gc.collect()
    assert pid is not None and not _alive(pid)


def test_the_child_ends_when_its_parent_dies_in_the_middle_of_an_endless_loop() -> None:
    program = (
        "import os, threading, time\n"
        "from onepolicy.tokens.templates.process import Child, Limits\n"
        "from onepolicy.tokens.templates.render import ChatTemplate\n"
        "child = Child(Limits(cpu_seconds=2))\n"
        "talk = [{'role': 'user', 'content': 'Hi'}]\n"
        "ChatTemplate('x', child=child).render(talk)\n"
        "print(child.pid, flush=True)\n"
        f"loop = ChatTemplate({_LOOP!r}, child=child)\n"
        "threading.Thread(target=lambda: loop.render(talk), daemon=True).start()\n"
        "time.sleep(0.2)\n"
        "os._exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    pid, until = int(done.stdout), time.monotonic() + 20
    while _alive(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _alive(pid)


def test_an_interrupted_render_cannot_be_taken_for_the_next_one() -> None:
    with Child() as child:
        template = ChatTemplate("{{ messages[0].content }}", child=child)
        template.render(TALK)
        first = child.pid
        original = child._receive

        def interrupted(until: float) -> dict[str, object]:
            child._receive = original  # type: ignore[method-assign]
            raise KeyboardInterrupt

        child._receive = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            template.render([{"role": "user", "content": "lost"}])
        assert template.render([{"role": "user", "content": "next"}]) == "next"
        assert child.pid != first


def test_threads_take_turns() -> None:
    with Child() as child:
        out: dict[int, str] = {}

        def work(i: int) -> None:
            template = ChatTemplate("{{ messages[0].content }}", child=child)
            out[i] = "".join(template.render([{"role": "user", "content": f"{i}.{k} "}]) for k in range(20))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert out == {i: "".join(f"{i}.{k} " for k in range(20)) for i in range(4)}


def test_the_environment_of_this_process_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "42")
    with Child() as child:
        ChatTemplate("x", child=child).render(TALK)
        with open(f"/proc/{child.pid}/environ", "rb") as file:
            assert b"SECRET_OF_MINE" not in file.read()


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"cpu_seconds": 0}, "cpu_seconds"),
        ({"wall_seconds": -1.0}, "wall_seconds"),
        ({"output_chars": 0}, "output_chars"),
        ({"memory_mb": 5}, "needs 64"),
        ({"cpu_seconds": float("nan")}, "cpu_seconds"),
    ],
)
def test_limits_that_are_none(limits: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Limits(**limits)  # type: ignore[arg-type]


def test_a_frozen_clock_and_the_real_one() -> None:
    with Child() as child:
        text = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"
        assert ChatTemplate(text, now=FROZEN, child=child).render(TALK) == "2026-01-02 03:04:05"
        now = ChatTemplate("{{ strftime_now('%s') }}", child=child).render(TALK)
        assert abs(float(now) - time.time()) < 60


def _alive(pid: int) -> bool:
    """A zombie is dead."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False
