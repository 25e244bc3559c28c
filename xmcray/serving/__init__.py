"""A bundle behind HTTP and gRPC: what a request is, how it is answered, and the application on Ray Serve."""
