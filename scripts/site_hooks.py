"""Hooks of mkdocs.yml: pages from files of the repository's root, and Markdown as GitHub reads it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from markdown import Extension, Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "LICENSE": "license.md",
}
"""Files of the root and their pages."""


class TwoSpaceLists(Extension):
    """Nested lists are indented by two spaces, as GitHub reads them. Must be the first extension, because it rebuilds the parser."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2
        md.build_parser()


def on_config(config: MkDocsConfig) -> None:
    config.markdown_extensions.insert(0, TwoSpaceLists())


def on_files(files: Files, config: MkDocsConfig) -> None:
    for name, page in FROM_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text if name.endswith(".md") else f"# License\n\n```text\n{text}\n```\n"))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages: a link is relative to the file in the repository, whose folder may differ from the page's."""
    uri = page.file.src_uri
    source = next((name for name, generated in FROM_ROOT.items() if generated == uri), f"docs/{uri}")

    def rewritten(link: re.Match[str]) -> str:
        path, anchor = link[2], link[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = FROM_ROOT.get(target, target.removeprefix("docs/"))
        return f"{link[1]}{posixpath.relpath(target, posixpath.dirname(uri) or '.')}{anchor})"

    return re.sub(r"(\]\()(?![a-z]+:|#|/)([^)#\s]+)(#[^)\s]*)?\)", rewritten, markdown)
