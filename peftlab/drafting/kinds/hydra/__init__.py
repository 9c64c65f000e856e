"""Draft kind ``hydra``: heads that read the tokens drafted before."""
