"""The kinds of answers that labelled tasks have, one file each."""
