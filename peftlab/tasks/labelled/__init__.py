"""Classification and regression: rows, metrics, loss and scores."""
