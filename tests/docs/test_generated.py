"""Generated pages are current: `python docs/_generate.py` writes them again."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "_generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = generator()


@pytest.mark.parametrize("name", GENERATE.PAGES)
def test_page_is_current(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == GENERATE.PAGES[name](), "run: python docs/_generate.py"


def test_pages_are_generated_without_the_heavy_packages(tmp_path: Path) -> None:
    """Engines declare their switches without being importable whole."""
    hidden = "sys.modules.update(dict.fromkeys(['torch', 'transformers', 'vllm', 'pyarrow']))"
    code = f"import runpy, sys; {hidden}; pages = runpy.run_path({str(DOCS / '_generate.py')!r})['PAGES']"
    write = f"import pathlib; [(pathlib.Path({str(tmp_path)!r}) / k).write_text(v()) for k, v in pages.items()]"
    subprocess.run([sys.executable, "-X", "utf8", "-c", f"{code}; {write}"], check=True, timeout=60)
    for name in GENERATE.PAGES:
        assert (tmp_path / name).read_text(encoding="utf-8") == (DOCS / name).read_text(encoding="utf-8")
