"""The dashboard: one page that shows what a group does, live, without taking part in it."""
