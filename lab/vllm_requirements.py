"""Prints the requirements of a wheel without torch and its family, one a line.

vLLM's CPU wheel pins a torch build that is not the one of `constraints/cpu.txt`; its other requirements hold.
"""

from __future__ import annotations

import re
import sys
import zipfile
from email.parser import Parser

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def requirements(wheel: str) -> list[str]:
    """Unconditional requirements, and those whose marker is not an extra."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    keep = (line for line in lines if "extra ==" not in line)
    return [line for line in keep if re.split(r"[\s;<>=!~\[(]", line)[0].lower() not in LEFT_OUT]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
