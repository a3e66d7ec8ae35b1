"""Hooks of MkDocs: pages that are generated from the sources, and formulas as MathML.

Generated are the command line, the run file, the Python names, the schemas, the results and the files of the
root that belong to a site. They exist in the built site only, so that none of them can go out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FETCHED_WORKER = "https://unpkg.com/iframe-worker/shim"
OWN_WORKER = "assets/worker-from-disk.js"
ROOT = Path(__file__).resolve().parent.parent
# MkDocs loads this file by its path; `docs_site` and `benchmarks` are packages of the repository's root.
sys.path.insert(0, str(ROOT))

from benchmarks.results.pages import result_pages  # noqa: E402
from docs_site.api import api_pages  # noqa: E402
from docs_site.command_line import command_line_page  # noqa: E402
from docs_site.mathematics import with_mathml  # noqa: E402
from docs_site.root_files import NOTEBOOK, notebook_page, root_pages  # noqa: E402
from docs_site.run_file import run_file_page  # noqa: E402
from docs_site.schemas import schema_files, schemas_page  # noqa: E402


def generated_pages(docs: Path) -> dict[str, str]:
    """Address in the site → content of every page and file that is generated.

    Args:
        docs: The directory of the pages that are written by hand.
    """
    return {
        "reference/command-line.md": command_line_page(),
        "reference/run-file.md": run_file_page(),
        "reference/schemas.md": schemas_page(docs),
        **schema_files(),
        **api_pages(),
        **result_pages(ROOT / "benchmarks" / "records"),
        **root_pages(ROOT),
        "how-to/notebook.md": notebook_page(ROOT / NOTEBOOK),
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages to those on disk."""
    for address, content in generated_pages(Path(config.docs_dir)).items():
        files.append(File.generated(config, address, content=content))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Lets a script of this site take the place of the one that the theme fetches for pages from disk."""
    return with_own_worker(output, page.url)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Likewise for the page that is shown where there is none."""
    return with_own_worker(output_content, template_name)


def with_own_worker(page: str, address: str) -> str:
    """Replaces the address of the script in a page of the site."""
    depth = address.count("/")
    return page.replace(FETCHED_WORKER, f"{'../' * depth}{OWN_WORKER}")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the formulas of a page into MathML."""
    return with_mathml(html, page.file.src_uri)
