"""Generated answers to held-out prompts, and the metrics that they are scored by."""
