"""What a trained model on the disk says: its scores on a task, and its predictions for new rows."""
