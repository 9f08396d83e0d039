"""What several test files share; imported as `support.…` (pythonpath in pyproject.toml)."""
