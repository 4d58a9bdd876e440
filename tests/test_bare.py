"""The core imports with numpy alone; `import onepolicy` and `--help` load neither torch nor pyarrow.

A virtual environment with numpy and nothing else is built for it. Each test is shown able to fail.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from test_layers import CORE, SRC

pytestmark = pytest.mark.bare

ROOT = SRC.parents[1]
HEAVY = ("torch", "pyarrow", "transformers", "vllm", "scipy")


def modules() -> list[str]:
    """Every importable module of the core."""
    names = [".".join(("onepolicy", *p.relative_to(SRC).with_suffix("").parts)) for p in sorted(SRC.rglob("*.py"))]
    core = [n.removesuffix(".__init__") for n in names if n.split(".")[1].removesuffix("__init__") in CORE | {""}]
    return ["onepolicy", *core]


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints" / "cpu.txt"), "numpy"], check=True)
    (home / "onepolicy.pth").write_text("")
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "onepolicy.pth").write_text(str(SRC.parent))
    return python


def run(python: Path | str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=120)


def test_every_module_of_the_core_imports_with_numpy_alone(bare: Path) -> None:
    assert len(modules()) > 25
    got = run(bare, "import importlib\nfor m in " + repr(modules()) + ": importlib.import_module(m)")
    assert got.returncode == 0, got.stderr


def test_that_test_can_fail(bare: Path) -> None:
    assert "No module named 'pyarrow'" in run(bare, "import pyarrow").stderr
    assert "No module named 'torch'" in run(bare, "import torch").stderr


def test_a_verdict_without_anything_but_numpy(bare: Path) -> None:
    """Not only imports: records in, outcome out."""
    code = """
from onepolicy.records import from_records
from onepolicy.align import align
from onepolicy.reduce import reduce
from onepolicy.metrics import METRICS
from onepolicy.gates.bounds import load
from onepolicy.gates.judge import judge
rows = [{"token_ids": [1, 2, 3], "prompt_length": 1, "group_id": str(i),
         "sampler_logprobs": [None, -1.0, -2.0], "old_logprobs": [None, -1.0, -2.0]} for i in range(600)]
print(judge(reduce(align(from_records(rows)), METRICS.values()), load("bitwise")).outcome)
"""
    assert run(bare, code).stdout.strip() == "pass"


def test_the_command_without_its_packages_says_what_to_install(bare: Path) -> None:
    got = run(
        bare, "from onepolicy.cli.main import main; import sys; sys.argv = ['onepolicy', '--help']; sys.exit(main())"
    )
    assert got.returncode == 2
    assert got.stderr.count("\n") == 1
    assert "pip install 'onepolicy[cli]'" in got.stderr


LOADED = "import sys; print([m for m in {heavy!r} if m in sys.modules])"


def loaded(code: str) -> str:
    return run(sys.executable, f"{code}\n{LOADED.format(heavy=HEAVY)}").stdout.strip().splitlines()[-1]


def test_import_loads_nothing_heavy() -> None:
    assert loaded("import onepolicy") == "[]"


@pytest.mark.parametrize("verb", ["", "record", "check", "compare", "judge", "explain"])
def test_help_loads_nothing_heavy(verb: str) -> None:
    args = ["onepolicy", *([verb] if verb else []), "--help"]
    code = f"import sys; sys.argv = {args!r}\nfrom onepolicy.cli.main import main\ntry: main()\nexcept SystemExit: pass"
    assert loaded(code) == "[]"


def test_the_probe_for_heavy_modules_can_fail() -> None:
    assert loaded("import pyarrow") == "['pyarrow']"
