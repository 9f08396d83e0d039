"""Identity: keys and name of a node, its incarnations, its namespaces, private files."""
