"""Preference data: a better and a worse answer to each prompt."""
