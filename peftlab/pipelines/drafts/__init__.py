"""What is done with a draft once there is one: generating text, timing it, planning."""
