"""Draft kind ``mtp``: one transformer layer on the target's last state, used for every drafted token."""
