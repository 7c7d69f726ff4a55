"""Other nodes' DRAM: the data port of a node client, and what workers do with it."""
