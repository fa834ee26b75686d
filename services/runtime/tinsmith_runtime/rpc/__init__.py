"""gRPC of a pod: server, interceptor, authentication, the codec of errors, calls to the scheduler.

The only folder of the runtime, with `pod`, that may import grpc.
"""
