"""What makes a run cheaper, or shows whether it could be: resting layers, chosen examples, emulated number formats."""
