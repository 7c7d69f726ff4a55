"""The contract of kvpool: messages, errors, namespaces, keys and geometry that both sides agree on."""
