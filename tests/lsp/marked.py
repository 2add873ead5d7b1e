"""Snapshots written as source with a `|` where the cursor is."""

import re

from infill_lsp.core import Snapshot
from infill_lsp.documents import Document


def at(source: str, language: str = "python", uri: str = "file:///project/module.py") -> Snapshot:
    """The document without the first `|` of `source`, with the cursor there."""
    before, _, after = source.partition("|")
    lines = re.split("\r\n|\n|\r", before)
    return Document(uri, language, 1, before + after).snapshot(len(lines) - 1, len(lines[-1]), "utf-32")
