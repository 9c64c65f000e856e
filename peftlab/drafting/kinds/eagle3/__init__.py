"""Draft kind ``eagle3``: one layer on three of the target's states, which drafts token by token."""
