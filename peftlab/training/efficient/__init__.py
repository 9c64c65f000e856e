"""What makes a step, or a run, cheaper: layers that rest, examples that are chosen."""
