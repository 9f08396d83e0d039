"""Who looks: the programs a person runs."""
