"""What is learnt: the task table, its data, tokenising, batches and metrics. Importing this loads none of
them."""
