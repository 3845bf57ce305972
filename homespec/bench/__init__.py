"""Is speculation worth it on this box? Arms that differ in drafting alone, prompt by prompt.

`run` in runner.py is the measurement; statistics.py says what it shows.
"""
