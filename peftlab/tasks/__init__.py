"""Tasks: the task table, data, tokenising, batches and metrics. Importing this package loads none of them."""
