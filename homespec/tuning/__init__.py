"""What this box is good at, found out by measuring."""
