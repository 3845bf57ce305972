"""The algorithm: drafts, verification, and the loop. Open `speculative.py` first."""
