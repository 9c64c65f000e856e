"""Draft kind ``gated_lora``: a LoRA on the frozen target that acts on masks alone."""
