"""Arrays in motion, pure: who sends which part to whom, as data; numpy only."""
