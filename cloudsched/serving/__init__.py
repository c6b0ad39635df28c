"""The policy as a service: decisions over HTTP and gRPC, on Ray Serve."""
