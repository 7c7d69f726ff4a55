"""Client side of kvpool: the node client daemon and the worker SDK."""
