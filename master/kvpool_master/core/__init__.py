"""The pure core of the Master: commands in, outcomes out; no I/O, clock, randomness or protobuf."""
