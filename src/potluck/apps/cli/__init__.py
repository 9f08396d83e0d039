"""The command `potluck`."""
