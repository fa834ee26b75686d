"""Native gRPC calls, passed to the pod that owns their resource."""
