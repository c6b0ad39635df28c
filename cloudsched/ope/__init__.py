"""Off-policy evaluation: how good a policy would be, from the decisions of others."""
