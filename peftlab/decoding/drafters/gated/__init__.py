"""A draft that is a LoRA on the target, for masks alone: in a pass of its own, or in the verification pass."""
