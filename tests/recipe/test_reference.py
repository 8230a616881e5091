"""The reference page is the schema's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mtpctl.recipe.fields import walk_keys

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate_recipe_reference.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_recipe_reference_describes_every_key() -> None:
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    for key in walk_keys():
        if not key.sections:
            assert f"`{key.dotted}" in page, key.dotted
            assert key.field.description, key.dotted
