"""The parts of the benchmark of collectives; the command is ``all_reduce.py`` beside."""
