"""The text a draft learns from: prompts and requests, written continuations, rows and batches."""
