"""Where the engine's KV lives: base.py says what a device does, one file per kind does it."""
