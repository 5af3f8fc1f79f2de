"""The process: gRPC services around the scheduling core, its run loop, engines, configuration, metrics and command line."""
