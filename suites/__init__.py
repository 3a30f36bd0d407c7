"""The contracts as tests, over any kernel."""
