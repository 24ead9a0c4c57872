"""How long a test waits for what may never come: no load reaches it, and nothing else is timed."""

HANGS = 15 * 60  # seconds
