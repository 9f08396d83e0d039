"""The version of this package, also for what a process reports about itself."""

__version__ = "0.1.0"
