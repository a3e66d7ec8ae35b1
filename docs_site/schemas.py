"""The page of published schemas, and the schema files that are not in `docs/`."""

from __future__ import annotations

import json
from pathlib import Path

from docs_site.markdown import code, table
from loka_onnx.config import run_file_schema

RUN_FILE = "reference/run-file-schema.json"


def schema_files() -> dict[str, str]:
    """Address in the site → JSON Schema."""
    return {RUN_FILE: json.dumps(run_file_schema(), indent=2, ensure_ascii=False) + "\n"}


def schemas_page(docs: Path) -> str:
    """The page, as Markdown.

    Args:
        docs: Where the schemas of documents are published, as ``*-schema.json``.
    """
    found = {"run-file-schema.json": run_file_schema()}
    found |= {f"../{path.name}": json.loads(path.read_text()) for path in sorted(docs.glob("*-schema.json"))}
    rows = [
        (
            schema.get("title", Path(address).stem),
            _version(schema),
            f"[{code(Path(address).name)}]({address})",
        )
        for address, schema in found.items()
    ]
    return "\n\n".join(
        (
            "# Schemas",
            "Documents that other programs read have a JSON Schema (2020-12). The major number of a "
            "document's schema changes where a program that reads the old form would fail; readers refuse a "
            "schema that they do not know. `loka-onnx schema` prints the schemas of the installed version.",
            table(("Document", "Schema", "File"), rows),
            "What a bundle holds is described in [Bundle format](../bundle.md).",
        )
    )


def _version(schema: dict[str, object]) -> str:
    properties = schema.get("properties")
    stated = properties.get("schema", {}).get("const") if isinstance(properties, dict) else None
    return code(str(stated)) if stated else ""
