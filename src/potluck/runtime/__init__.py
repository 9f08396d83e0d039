"""The loops that drive the layers below: they wait, ask the cores, and carry out what they say."""
