"""Where the repository lies."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
