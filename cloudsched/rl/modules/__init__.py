"""RLModules that wrap the networks."""
