"""The documentation site builds without warnings, and shows Markdown as GitHub does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = sorted(page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md"))


def build(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text(encoding="utf-8")


def test_every_page_is_built(site: Path) -> None:
    for path in PAGES:
        folder = path.parent if path.name == "README.md" else path.with_suffix("")
        assert (site / folder / "index.html").is_file(), path


def test_links_between_root_and_docs_lead_to_pages(site: Path) -> None:
    assert 'href="quickstart/"' in page(site, ".") and 'src="images/architecture.svg"' in page(site, ".")
    assert 'href="../contributing/#measuring"' in page(site, "bench")
    assert 'href="../architecture/#layers"' in page(site, "contributing")


def test_nested_list_stays_nested(site: Path) -> None:
    assert re.search(r"<li><strong>An advantage\.</strong><ul>\s*<li>", page(site, "architecture"))


def test_search_finds_recipe_keys(site: Path) -> None:
    assert "staleness_threshold" in (site / "search" / "search_index.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("link", ["missing.md", "runs.md#no-such-section"])
def test_broken_link_fails_the_build(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n[x]({link})\n")
    (tmp_path / "docs" / "runs.md").write_text("# Runs\n")
    rules = re.search(r"^validation:\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert rules is not None
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\n{rules[0]}")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and link.split("#")[-1] in done.stderr


def test_versions_of_citation_and_package_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert project is not None and citation["version"] == project[1]


def test_workflow_runs_the_developers_script() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))["jobs"]
    assert ".ci/run" in [step.get("run") for step in jobs["test"]["steps"]]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert "mkdocs build --strict" in [step.get("run") for step in jobs["site"]["steps"]]
