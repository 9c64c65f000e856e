"""Draft kind ``medusa``: heads on the target's last hidden state."""
