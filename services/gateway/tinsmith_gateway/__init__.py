"""The gateway pod: one address for HTTP clients of other systems and for native gRPC."""
