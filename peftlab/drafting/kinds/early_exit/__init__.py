"""Draft kind ``early_exit``: the target's own first layers (LayerSkip)."""
