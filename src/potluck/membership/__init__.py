"""Membership, pure: health, election, views and their merging, as decisions."""
