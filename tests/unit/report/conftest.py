"""The scenarios of the pages serve here too: one real report for each finding code."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
