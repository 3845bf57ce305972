"""The steps of `scripts/setup`, one file each; first_run.py calls them in order.

They run before anything is installed, so they use the standard library only.
"""
