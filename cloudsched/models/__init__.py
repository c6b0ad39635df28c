"""Networks, masks and losses: torch only, no Ray."""
