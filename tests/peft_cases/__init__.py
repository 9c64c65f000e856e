"""The measure of peft's adapters: what peft saves, loaded, trained, saved again and merged by peftlab, beside peft."""
