"""`onepolicy.testing` hands on the assertion of the tokens room, and loads that room only when asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from onepolicy import testing
from onepolicy.tokens import fidelity


def test_the_assertion_on_tokens_is_handed_on() -> None:
    assert testing.assert_token_fidelity is fidelity.assert_token_fidelity
    assert testing.TokenFidelityError is fidelity.TokenFidelityError
    with pytest.raises(AttributeError, match="no attribute 'assert_tokens'"):
        getattr(testing, "assert_tokens")  # noqa: B009


def test_every_public_name_is_there() -> None:
    assert all(hasattr(testing, name) for name in testing.__all__)


def test_the_room_of_tokens_is_loaded_when_asked_for() -> None:
    code = "import sys, onepolicy.testing as t; a = 'onepolicy.tokens.fidelity' in sys.modules; t.TokenFidelityError; "
    got = subprocess.run(
        [sys.executable, "-c", code + "print(a, 'onepolicy.tokens.fidelity' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert got.stdout.split() == ["False", "True"]
