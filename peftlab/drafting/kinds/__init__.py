"""The kinds of draft: a row of ``table.DRAFTS`` and a folder each."""
