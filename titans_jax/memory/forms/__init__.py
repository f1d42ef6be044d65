"""How a rule is run: token by token, by associative scans, or chunk by chunk with matrix products."""
