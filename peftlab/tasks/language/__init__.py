"""Tasks of causal language models: chats, completions and plain text."""
