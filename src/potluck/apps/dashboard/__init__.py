"""The dashboard: one page that shows what a namespace does, live, without taking part in it."""
