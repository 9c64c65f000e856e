"""What `peftlab validate` checks beside the recipe itself."""
